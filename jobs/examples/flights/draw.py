"""The figure docs/flights.png: the newest predicted day of the carrier with the most flights."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import matplotlib.dates as mdates
import matplotlib.pyplot as plt

from sparkdl.pipeline import Pipeline
from sparkdl.tables.table import Table

HERE = Path(__file__).parent
LOWEST, HIGHEST = -75, 165


def draw(picture: Path) -> None:
    """Draw the newest window of the predictions.

    They are those that ``sparkdl run flights.yaml`` has left.

    Args:
        picture: where it goes.
    """
    predictions = Table(str(Pipeline.load(HERE / "flights.yaml").spec.score.target)).rows().to_pandas()
    day = predictions["_window"].max()
    flights = predictions[predictions["_window"] == day].sort_values("departs")
    carrier = flights.carrier.value_counts().index[0]
    flights = flights[flights.carrier == carrier]  # all of them at once hide each other
    landed = flights[flights.arr_delay.notna()]
    inside = landed.arr_delay.between(landed.q10, landed.q90)
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(10, 4), dpi=90, layout="constrained")
    axes.vlines(
        flights.departs, flights.q10, flights.q90, color="#9ecae1", lw=2.5, alpha=0.6, label="predicted, 10 % to 90 %"
    )
    axes.scatter(flights.departs, flights.prediction, marker="_", s=25, color="#08519c", label="predicted, median")
    for chosen, color, name in ((inside, "#31a354", "arrived within"), (~inside, "#e6550d", "arrived outside")):
        some = landed[chosen]
        clipped = some.arr_delay.clip(LOWEST + 3, HIGHEST - 3)
        axes.scatter(some.departs, clipped, s=16, color=color, zorder=3, lw=0, label=f"{name}: {len(some)}")
    axes.set_ylim(LOWEST, HIGHEST)
    axes.set_ylabel("minutes late")
    axes.set_title(
        f"{len(flights)} flights of {carrier} from New York, {day}, as predicted an hour before each", fontsize=11
    )
    axes.xaxis.set_major_formatter(mdates.DateFormatter("%H:%M"))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(picture, metadata={"Software": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the newest day that was predicted.")
    parser.add_argument("--to", type=Path, default=HERE.parents[2] / "docs" / "flights.png", help="the picture")
    draw(parser.parse_args().to)
