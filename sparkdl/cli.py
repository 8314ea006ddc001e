"""The command line: ``sparkdl init | check | plan | run | status | report | doctor | shards | models``.

Enters: words of a shell. Leaves: tables on standard output, and exit code 0 (fine), 1 (refused or failed) or
2 (wrong usage). The commands of a pipeline exit with the codes of ``pipeline/record.py``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from sparkdl.config import require
from sparkdl.errors import SparkdlError

__all__ = ["job", "main"]

HOUR, DAY = 3600.0, 86400.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options, Console()))
    except SparkdlError as error:
        print(f"sparkdl: {error}", file=sys.stderr)
        return 1


def job(*words: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command on the file that ``--config`` names, as the jobs for ``spark-submit`` do; return its exit code.

    What ``spark-submit`` says of master, memory and settings wins over the section ``spark`` of the file.

    Args:
        words: the command and options of its own; those of the command line come after them, and win.
        arguments: the command line; None takes this process's.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    found, others = finder.parse_known_args(arguments)
    return main([*words, *([] if found.config is None else [found.config]), *others])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparkdl", description="From Spark DataFrames to PyTorch models and back.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _pipeline_commands(commands)
    _command(commands, "doctor", _doctor, "what this machine has, and what really works on it")

    shards = commands.add_parser("shards", help="shard sets").add_subparsers(required=True, metavar="ACTION")
    listing = _command(shards, "list", _shards_list, "the sets in a folder")
    listing.add_argument("uri", help="a set, or a folder of sets")
    vacuum = _command(shards, "gc", _shards_gc, "remove files that no manifest names and, if asked, old sets")
    vacuum.add_argument("uri", help="a set, or a folder of sets")
    vacuum.add_argument("--orphan-hours", type=float, default=24.0, help="age from which orphans go (24)")
    vacuum.add_argument("--set-days", type=float, help="also remove whole sets older than this")
    vacuum.add_argument("--dry-run", action="store_true", help="only say what would be removed")

    models = commands.add_parser("models", help="the model registry").add_subparsers(required=True, metavar="ACTION")
    for name, command, text, words in (
        ("list", _models_list, "models, or the versions of one", ("[NAME]",)),
        ("show", _models_show, "one version: metrics, parameters, lineage", ("NAME", "WHICH")),
        ("history", _models_history, "what happened to a model", ("NAME",)),
        ("promote", _models_promote, "point an alias to a version", ("NAME", "VERSION")),
        ("rollback", _models_rollback, "point an alias back to what it pointed to before", ("NAME",)),
    ):
        action = _command(models, name, command, text)
        action.add_argument("registry", help="address of the registry")
        for word in words:
            optional: dict[str, Any] = {"nargs": "?"} if word.startswith("[") else {}
            kind: dict[str, Any] = {"type": int} if word == "VERSION" else {}
            action.add_argument(word.strip("[]").lower(), **optional, **kind)
        if name in ("promote", "rollback"):
            action.add_argument("--alias", default="champion", help="which alias (champion)")
    return parser


def _pipeline_commands(commands: Any) -> None:
    begin = _command(commands, "init", _with_exit_codes(_init), "look at a table, and write a pipeline for it")
    begin.add_argument("name", help="the pipeline's name, or the folder to make, whose last part it is")
    begin.add_argument(
        "--from", required=True, dest="table", metavar="TABLE",
        help="a Delta table, a file or folder of Parquet, CSV or JSON, or catalog.schema.table (which starts Spark)",
    )  # fmt: skip
    begin.add_argument("--label", help="the column to predict; guessed if it is left out")
    for name, pipeline_command, text in (
        ("check", _check, "whether a pipeline file is sound, and its source has the columns; starts nothing"),
        ("plan", _plan, "which windows are due and why, which steps would be kept; runs nothing"),
        ("run", _run, "do what is due, from the source to predictions"),
        ("status", _status, "last run, champion, windows done and due, who runs it now"),
        ("report", _report, "where the HTML report of the last run lies; written anew if it is gone"),
    ):
        action = _command(commands, name, _with_exit_codes(pipeline_command), text)
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
                help="do not look at the source's columns; without this, a source that cannot be reached is said, and "
                "the file is sound all the same",
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
            action.add_argument(
                "--dry-run", action="store_true", help="print what plan prints, run nothing, exit as a run would"
            )
            action.add_argument(
                "--ok-when-nothing",
                action="store_true",
                help="exit with 0, not 10 or 20, when nothing was new or the model was not promoted",
            )


def _command(
    parent: Any, name: str, command: Callable[[argparse.Namespace, Console], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = parent.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    return parser


def _with_exit_codes(
    command: Callable[[argparse.Namespace, Console], int],
) -> Callable[[argparse.Namespace, Console], int]:
    """The command, with an error as one sentence on standard error and the exit code that it has in a record."""

    def run(options: argparse.Namespace, console: Console) -> int:
        from sparkdl.pipeline.state.record import exit_code_of

        try:
            return command(options, console)
        except (Exception, KeyboardInterrupt) as error:
            code = exit_code_of(error)
            if code == 4:
                traceback.print_exception(error)
            text = str(error) if isinstance(error, SparkdlError) else " ".join(str(error).split())
            kind = "" if isinstance(error, SparkdlError) else f"{type(error).__name__}: "
            said = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{kind}{text}"
            print(f"sparkdl: {said}", file=sys.stderr)
            return code

    return run


def _init(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.pipeline.init import init

    done = init(options.name, options.table, options.label)
    _print_lines(console, [*done.lines(), ("next", f"sparkdl check {shlex.quote(done.path)}, then plan and run")])
    return 0


def _check(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.pipeline import Pipeline

    pipeline = Pipeline.load(options.file, options.overrides)
    unknown = "" if options.offline else pipeline.check()
    spec, labels = pipeline.spec, ", ".join(pipeline.spec.label)
    text = f"{options.file} is sound: pipeline {spec.name}, {len(spec.features)} features, label {labels}"
    console.print(text, markup=False, soft_wrap=True)
    if unknown:
        console.print(f"note: {unknown}", markup=False, highlight=False, soft_wrap=True)
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
    _print_lines(console, plan_lines(plan))
    return plan.exit_code


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """Which part of its work a pipeline shall do."""
    return {"backfill": options.backfill, "until": options.until, "train": not options.without_training}


def _exit_code(options: argparse.Namespace, code: int) -> int:
    return 0 if options.ok_when_nothing and code in (10, 20) else code


def _run(options: argparse.Namespace, console: Console) -> int:
    if options.dry_run:
        return _exit_code(options, _show_plan(options, console))
    from sparkdl.pipeline import Pipeline
    from sparkdl.pipeline.summary import summary_lines

    record = Pipeline.load(options.file, options.overrides).run(**_asked(options))
    console.print(
        f"[bold]{record.pipeline}: {record.outcome}[/bold] in {record.seconds:.1f} s", highlight=False, soft_wrap=True
    )
    _print_lines(console, summary_lines(record))
    return _exit_code(options, record.exit_code)


def _status(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.pipeline import Pipeline
    from sparkdl.pipeline.summary import status_lines

    status = Pipeline.load(options.file, options.overrides).status()
    console.print(f"[bold]{status.pipeline}[/bold]", highlight=False, soft_wrap=True)
    _print_lines(console, status_lines(status))
    return 0


def _report(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.pipeline import Pipeline

    place = Pipeline.load(options.file, options.overrides).report(options.run_id)
    console.print(place, markup=False, highlight=False, soft_wrap=True)
    if options.open:
        import webbrowser

        from sparkdl.storage import Storage

        local = Storage.of(place).local_path()
        require(local is not None, f"no browser opens {place}: copy it from there")
        require(local is not None and webbrowser.open(local.as_uri()), f"there is no browser here: open {place}")
    return 0


def _print_lines(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        console.print(f"{name:{width}}  {text}", markup=False, highlight=False, soft_wrap=True)


def _from_to(text: str) -> tuple[str, str]:
    first, dots, last = text.partition("..")
    if not (first and dots and last):
        raise argparse.ArgumentTypeError(f"{text!r} is no span of windows: write 2026-03-01..2026-03-07")
    return first, last


def _doctor(_: argparse.Namespace, console: Console) -> int:
    from sparkdl.doctor import checks

    table = Table("check", "found", "", "what to do", title="sparkdl doctor", title_justify="left")
    marks = {True: "[green]pass[/green]", False: "[red]FAIL[/red]", None: "[yellow]none[/yellow]"}
    failed = 0
    with console.status("checking; two ranks are started for each backend"):
        for check in checks():
            table.add_row(check.name, check.found, marks[check.ok], check.remedy)
            failed += check.ok is False
    console.print(table)
    console.print("everything needed works" if not failed else f"{failed} of {table.row_count} checks failed")
    return 1 if failed else 0


def _shards_list(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.shards.sets import list_sets

    table = Table("set", "rows", "shards", "size", "written", "source", "orphans")
    for found in list_sets(options.uri):
        orphans = f"{found.orphan_files} ({_size(found.orphan_bytes)})" if found.orphan_files else ""
        if found.manifest is None:
            table.add_row(found.uri, found.problem or "not committed", "", "", "", "", orphans)
            continue
        m = found.manifest
        source = f"{m.source.uri} version {m.source.version}" if m.source else ""
        table.add_row(
            found.uri, f"{m.rows:,}", str(len(m.shards)), _size(m.bytes), _time(m.created), source, orphans
        )  # fmt: skip
    console.print(table if table.row_count else f"no shard sets in {options.uri}")
    return 0


def _shards_gc(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.shards.sets import collect_garbage

    removed = collect_garbage(
        options.uri,
        orphan_seconds=options.orphan_hours * HOUR,
        set_seconds=None if options.set_days is None else options.set_days * DAY,
        dry_run=options.dry_run,
    )
    for each in removed:
        console.print(f"{each.uri}  {_size(each.bytes)}  {each.reason}", soft_wrap=True)
    verb = "would be freed" if options.dry_run else "freed"
    console.print(f"{len(removed)} removed, {_size(sum(each.bytes for each in removed))} {verb}")
    return 0


def _models_list(options: argparse.Namespace, console: Console) -> int:
    registry = _registry(options)
    if options.name is None:
        table = Table("model", "versions", "aliases")
        for name in registry.models():
            aliases = ", ".join(f"{alias} → {version}" for alias, version in registry.aliases(name).items())
            table.add_row(name, str(len(registry.list(name))), aliases)
        console.print(table if table.row_count else f"no models in {options.registry}")
        return 0
    table = Table("version", "published", "aliases", "metrics", "trained on")
    for each in registry.list(options.name):
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in each.metrics.items())
        source = f"{each.lineage.get('source_table')} version {each.lineage.get('source_version')}"
        table.add_row(str(each.version), _time(each.published), ", ".join(each.aliases), metrics, source)
    console.print(table if table.row_count else f"no versions of {options.name} in {options.registry}")
    return 0


def _models_show(options: argparse.Namespace, console: Console) -> int:
    which = int(options.which) if options.which.isdigit() else options.which
    found = _registry(options).get(options.name, which)
    table = Table.grid(padding=(0, 2))
    for name in ("name", "version", "aliases", "published", "uri", "artifact", "metrics", "parameters", "lineage"):
        table.add_row(f"[bold]{name}[/bold]", str(getattr(found, name)))
    console.print(table)
    return 0


def _models_history(options: argparse.Namespace, console: Console) -> int:
    table = Table("time", "what", "version", "alias", "before", "why")
    for event in _registry(options).history(options.name):
        before = "" if event.previous is None else str(event.previous)
        table.add_row(_time(event.time), event.kind, str(event.version), event.alias or "", before, event.reason)
    console.print(table if table.row_count else f"nothing happened to {options.name} in {options.registry}")
    return 0


def _models_promote(options: argparse.Namespace, console: Console) -> int:
    registry = _registry(options)
    now = registry.aliases(options.name).get(options.alias)
    done = registry.set_alias(
        options.name, options.alias, options.version, expected=now, reason="sparkdl models promote"
    )
    return _moved(options, console, done)


def _models_rollback(options: argparse.Namespace, console: Console) -> int:
    return _moved(options, console, _registry(options).rollback(options.name, options.alias))


def _moved(options: argparse.Namespace, console: Console, done: Any) -> int:
    verb = f"moved from {done.previous} to {done.version}" if done.moved else f"stays at {done.version}: {done.reason}"
    console.print(f"{options.alias} of {options.name} {verb}")
    return 0


def _registry(options: argparse.Namespace) -> Any:
    from sparkdl.models.registry import ModelRegistry

    return ModelRegistry(options.registry)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _time(when: float | datetime | None) -> str:
    if when is None:
        return ""
    return (when if isinstance(when, datetime) else datetime.fromtimestamp(when, UTC)).strftime("%Y-%m-%d %H:%M")


if __name__ == "__main__":
    sys.exit(main())
