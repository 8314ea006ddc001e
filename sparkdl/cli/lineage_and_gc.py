"""``sparkdl models lineage | gc``: the files that a model comes from, and those that nobody needs."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.table import Column, Table

from sparkdl.cli.words import Answer, plain_text, shown, table_of, version_named
from sparkdl.config import require
from sparkdl.storage import size_text

if TYPE_CHECKING:
    from sparkdl.models.registry import ModelLineage, ModelRegistry

_SHOWN_FILES = 20
_MOST_HOURS = 1_000_000


def lineage(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    """What a version was trained on, or with ``--table`` what was trained on that."""
    if options.table is not None:
        require(options.name is None, f"{options.name} and --table are given: ask for a model, or for those of a table")
        return _models_of(registry, options)
    require(options.name is not None, "neither a model nor --table is given: say NAME@WHICH, or --table TABLE")
    narrowed = options.version is not None or options.file is not None
    require(not narrowed, "--version and --file say which models of a --table: give --table, too")
    origin = registry.lineage(*version_named(options.name, options.which))
    return Answer(value=origin, view=_view(origin))


def _view(origin: ModelLineage) -> Table:
    view = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name, text in (
        ("model", f"{origin.name} version {origin.version}"),
        (
            "table",
            f"{origin.table} version {shown(origin.table_version) or 'unknown'}" if origin.table else "",
        ),
        ("files", "" if origin.files is None else str(len(origin.files))),
        ("note", origin.note),
        ("shards", origin.shard_key or ""),
        ("code", origin.code_version or ""),
        ("parent", "" if origin.parent is None else f"version {origin.parent}"),
        ("software", ", ".join(f"{name} {version}" for name, version in sorted(origin.software.items()))),
    ):
        if text:
            view.add_row(f"[bold]{name}[/bold]", plain_text(text))
    files = origin.files or ()
    for file in files[:_SHOWN_FILES]:
        view.add_row("", plain_text(f"{file}{' (gone)' if file in origin.missing else ''}"))
    if len(files) > _SHOWN_FILES:
        view.add_row("", f"and {len(files) - _SHOWN_FILES} more, --json names them all")
    return view


def _models_of(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    readers = registry.models_of(options.table, options.version, file=options.file)
    rows = [
        (
            version.name,
            str(version.version),
            ", ".join(version.aliases),
            shown(version.lineage.get("source_version")),
            read,
        )
        for read, versions in (("yes", readers.versions), ("cannot be told", readers.unknown))
        for version in versions
    ]
    where = options.table if options.version is None else f"{options.table} version {options.version}"
    titles = ("model", "version", "aliases", "table version", "trained on it")
    return Answer(value=readers, view=table_of(titles, rows, f"no model was trained on {options.file or where}"))


def collect(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    """Remove what nobody needs, and say so."""
    hours = options.older_than_hours
    require(
        0 <= hours <= _MOST_HOURS, f"--older-than-hours {hours:g} does not lie in 0..{_MOST_HOURS}: give one that does"
    )
    age = timedelta(hours=hours)
    removed = registry.gc(age, keep_last=options.keep_last, name=options.name, dry_run=options.dry_run)
    lines = [f"{removal.kind} {removal.what}: {removal.reason}" for removal in removed]
    verb = "would be removed" if options.dry_run else "removed"
    size = sum(removal.bytes for removal in removed)
    lines.append(f"{len(removed)} {verb}" + (f", {size_text(size)}" if size else ""))
    return Answer(value={"dry_run": options.dry_run, "removed": removed}, view=plain_text("\n".join(lines)))


def lineage_arguments(parser: argparse.ArgumentParser) -> None:
    """The words of ``lineage``."""
    parser.add_argument("name", nargs="?", help="of the model, or NAME@WHICH")
    parser.add_argument("which", nargs="?", help="a version, or an alias (champion)")
    parser.add_argument("--table", help="the other way round: which models were trained on this table")
    parser.add_argument("--version", type=int, help="of the table; any by default")
    parser.add_argument("--file", help="of the table: which models were trained on versions with this file")


def collection_arguments(parser: argparse.ArgumentParser) -> None:
    """The words of ``gc``."""
    parser.add_argument("--older-than-hours", type=float, default=24.0, help="what is younger stays (24)")
    parser.add_argument("--keep-last", type=int, help="delete all but so many of each model's newest versions, too")
    parser.add_argument("--name", help="of the one model whose versions are deleted")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
