"""``sparkdl init | check | plan | run | status | report``: the commands of a pipeline file."""

from __future__ import annotations

import argparse
import logging
import shlex
from typing import Any

from rich.console import Console

from sparkdl.cli.words import add_command, plain_text, print_lines, with_exit_codes
from sparkdl.compat.interrupts import termination_interrupts
from sparkdl.config import require
from sparkdl.observe import logger

_EXIT_CODES = (
    "exit codes: 0 promoted, scored or stopped, 10 nothing new, 20 not promoted, 30 lost a race, 1 refused, 2 cluster, "
    "3 training, 4 an error nobody foresaw, 5 a store that did not answer, 130 interrupted; "
    "2, 3, 5 and 30 are worth another try"
)


def add_commands(commands: Any) -> None:
    """Add them to the parser of ``sparkdl``."""
    begin = add_command(commands, "init", with_exit_codes(_init), "look at a table, and write a pipeline for it")
    begin.add_argument("name", help="the pipeline's name, or the folder to make, whose last part it is")
    begin.add_argument(
        "--from", required=True, dest="table", metavar="TABLE",
        help="a Delta table, a file or folder of Parquet, CSV or JSON, or catalog.schema.table (which starts Spark)",
    )  # fmt: skip
    begin.add_argument("--label", help="the column to predict; guessed if it is left out")
    begin.add_argument(
        "--with-model", action="store_true", help="write the default network out beside the file, which names it then"
    )
    begin.add_argument("--label-type", metavar="TYPE", help="regression, binary or multiclass; else by its values")
    for name, pipeline_command, text in (
        (
            "check",
            _check,
            "whether a pipeline file is valid, and source and places fit it; only SQL starts Spark",
        ),
        ("plan", _plan, "which windows are due and why, which steps would be kept; runs nothing"),
        ("run", _run, "do what is due, from the source to predictions"),
        ("status", _status, "last run, champion, windows done and due, who runs it now"),
        ("report", _report, "where the HTML report of the last run lies; written anew if it is gone"),
    ):
        action = add_command(commands, name, with_exit_codes(pipeline_command), text)
        action.add_argument("file", help="the pipeline file, a path or URI")
        action.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
            help="overrides a value of the file, such as train.epochs=5; may be given again",
        )  # fmt: skip
        if name == "report":
            action.add_argument("run_id", nargs="?", help="of an earlier run; by default the last that did something")
            action.add_argument("--open", action="store_true", help="show it in a browser")
        if name == "check":
            action.add_argument(
                "--offline", action="store_true",
                help="look at the file alone; else a source that cannot be reached is mentioned, and the file is "
                "valid all the same, while a place that cannot be written is a mistake",
            )  # fmt: skip
        if name in ("plan", "run"):
            action.add_argument(
                "--backfill", type=_from_to, metavar="FROM..TO", help="ingest these windows again in any case"
            )
            action.add_argument("--until", metavar="STEP", help="end after this step; the next run goes on from there")
            action.add_argument(
                "--without-training", action="store_true", help="ingest and let the champion predict, learn nothing"
            )
        if name == "run":
            action.epilog = _EXIT_CODES
            action.add_argument(
                "--dry-run", action="store_true", help="print what plan prints, run nothing, exit as a run would"
            )
            action.add_argument(
                "--ok-when-nothing",
                action="store_true",
                help="exit with 0, not 10 or 20, when nothing was new or the model was not promoted",
            )


def _init(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.pipeline.init import init

    initialised = init(
        options.name, options.table, options.label, label_type=options.label_type, with_model=options.with_model
    )
    print_lines(
        console, [*initialised.lines(), ("next", f"sparkdl check {shlex.quote(initialised.path)}, then plan and run")]
    )
    return 0


def _check(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.pipeline import Pipeline

    unknown = Pipeline.check_file(options.file, options.overrides, offline=options.offline)
    spec = Pipeline.load(options.file, options.overrides).spec
    labels = ", ".join(spec.label)
    text = f"{options.file} is valid: pipeline {spec.name}, {len(spec.features)} features, label {labels}"
    console.print(plain_text(text), soft_wrap=True)
    if unknown:
        console.print(plain_text(f"note: {unknown}"), soft_wrap=True)
    return 0


def _plan(options: argparse.Namespace, console: Console) -> int:
    _show_plan(options, console)
    return 0


def _show_plan(options: argparse.Namespace, console: Console) -> int:
    """Print the plan; return the exit code that a run would end with, as far as that can be told."""
    from sparkdl.pipeline import Pipeline
    from sparkdl.pipeline.summary import plan_lines

    plan = Pipeline.load(options.file, options.overrides).plan(**_asked(options))
    verdict = "nothing new" if plan.nothing_new else "a run would do this"
    console.print(f"[bold]{plan.pipeline}: {verdict}[/bold]", highlight=False, soft_wrap=True)
    print_lines(console, plan_lines(plan))
    return plan.exit_code


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """Which part of its work a pipeline shall do."""
    return {"backfill": options.backfill, "until": options.until, "train": not options.without_training}


def _run(options: argparse.Namespace, console: Console) -> int:
    code = _show_plan(options, console) if options.dry_run else _run_now(options, console)
    return 0 if options.ok_when_nothing and code in (10, 20) else code


def _run_now(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.pipeline import Pipeline
    from sparkdl.pipeline.summary import summary_lines

    session_log = logger.getChild("session")  # whose settings count is said, whatever else is
    if not session_log.hasHandlers():
        session_log.addHandler(logging.StreamHandler())
        session_log.setLevel(logging.INFO)
    with termination_interrupts():  # schedulers and containers end a run so: it leaves a record, and no lease
        record = Pipeline.load(options.file, options.overrides).run(**_asked(options))
    console.print(
        f"[bold]{record.pipeline}: {record.outcome}[/bold] in {record.seconds:.1f} s", highlight=False, soft_wrap=True
    )
    print_lines(console, summary_lines(record))
    return record.exit_code


def _status(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.pipeline import Pipeline
    from sparkdl.pipeline.summary import status_lines

    status = Pipeline.load(options.file, options.overrides).status()
    console.print(f"[bold]{status.pipeline}[/bold]", highlight=False, soft_wrap=True)
    print_lines(console, status_lines(status))
    return 0


def _report(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.pipeline import Pipeline

    address = Pipeline.load(options.file, options.overrides).report(options.run_id)
    console.print(address, markup=False, highlight=False, soft_wrap=True)
    if options.open:
        import webbrowser

        from sparkdl.storage import Storage

        local = Storage.of(address).local_path()
        require(local is not None, f"no browser opens {address}: copy it from there")
        require(local is not None and webbrowser.open(local.as_uri()), f"there is no browser here: open {address}")
    return 0


def _from_to(text: str) -> tuple[str, str]:
    first, dots, last = text.partition("..")
    if not (first and dots and last):
        raise argparse.ArgumentTypeError(f"{text!r} is no span of windows: write 2026-03-01..2026-03-07")
    return first, last
