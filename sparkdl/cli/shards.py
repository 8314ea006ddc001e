"""``sparkdl shards list | gc``: the shard sets in a folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from sparkdl.cli.words import add_command, plain_text, table_of, time_text
from sparkdl.storage import size_text

HOUR, DAY = 3600.0, 86400.0


def add_commands(commands: Any) -> None:
    """Add them to the parser of ``sparkdl``."""
    shards = commands.add_parser("shards", help="shard sets").add_subparsers(required=True, metavar="ACTION")
    listing = add_command(shards, "list", _list, "the sets in a folder")
    listing.add_argument("uri", help="a set, or a folder of sets")
    vacuum = add_command(shards, "gc", _gc, "remove files that no manifest names and, if asked, old sets")
    vacuum.add_argument("uri", help="a set, or a folder of sets")
    vacuum.add_argument("--orphan-hours", type=float, default=24.0, help="age from which orphans go (24)")
    vacuum.add_argument("--set-days", type=float, help="also remove whole sets older than this")
    vacuum.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _list(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.shards.sets import list_sets

    rows: list[Sequence[str]] = []
    for shard_set in list_sets(options.uri):
        orphans = f"{shard_set.orphan_files} ({size_text(shard_set.orphan_bytes)})" if shard_set.orphan_files else ""
        if shard_set.manifest is None:
            rows.append((shard_set.uri, shard_set.problem or "not committed", "", "", "", "", orphans))
            continue
        m = shard_set.manifest
        source = f"{m.source.uri} version {m.source.version}" if m.source else ""
        rows.append((
            shard_set.uri, f"{m.rows:,}", str(len(m.shards)), size_text(m.bytes), time_text(m.created), source, orphans
        ))  # fmt: skip
    titles = ("set", "rows", "shards", "size", "written", "source", "orphans")
    console.print(table_of(titles, rows, f"no shard sets in {options.uri}"), soft_wrap=True)
    return 0


def _gc(options: argparse.Namespace, console: Console) -> int:
    from sparkdl.shards.sets import collect_garbage

    removed = collect_garbage(
        options.uri,
        orphan_seconds=options.orphan_hours * HOUR,
        set_seconds=None if options.set_days is None else options.set_days * DAY,
        dry_run=options.dry_run,
    )
    for folder in removed:
        console.print(plain_text(f"{folder.uri}  {size_text(folder.bytes)}  {folder.reason}"), soft_wrap=True)
    verb = "would be freed" if options.dry_run else "freed"
    console.print(f"{len(removed)} removed, {size_text(sum(folder.bytes for folder in removed))} {verb}")
    return 0
