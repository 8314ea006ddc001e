"""``python jobs/examples/rides``, ``make run``: makes the data if there are none, then runs the pipeline.

Besides ``--days N`` and ``--rows-per-day N`` it takes options of ``sparkdl run``, whose exit code it has.
"""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from ride_maker import best_rmse, make_rides

from sparkdl.cli import main
from sparkdl.cli.words import Parser
from sparkdl.pipeline import Pipeline

if __name__ == "__main__":
    here, began = Path(__file__).parent, datetime.now(UTC).isoformat(timespec="seconds")
    parser = Parser(prog="rides", description=__doc__, allow_abbrev=False)
    parser.add_argument("--days", type=int, help="days there shall be, 17 at first: one more lets a new day arrive")
    parser.add_argument("--rows-per-day", type=int, help="rows of each new day")
    parser.add_argument("--set", action="append", default=[], help="overrides a value of the file")
    given, words = parser.parse_known_args()
    raw, file = here / os.environ.get("RIDES", "sparkdl-data/raw"), str(here / "rides.yaml")
    if made := make_rides(raw, given.days, given.rows_per_day):
        print(f"made {len(made)} days of rides, {made[0]} to {made[-1]}, in {raw}", flush=True)
    code = main(["run", file, *words, *(f"--set={each}" for each in given.set)])
    record = Pipeline.load(file, given.set).status().last_run if code in (0, 20) else None
    if record is not None and record.evaluated is not None and record.started >= began:
        rmse, best = record.evaluated.decision.challenger.values["rmse"], best_rmse(raw, record.windows["validate"])
        print(f"noise floor  {best:.3f} min: the model's rmse {rmse:.3f} is {rmse / best - 1:.1%} above it")
    sys.exit(code)
