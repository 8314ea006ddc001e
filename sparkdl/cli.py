"""The command line: ``sparkdl doctor | shards | models``.

Enters: words of a shell. Leaves: tables on standard output, and exit code 0 (fine), 1 (refused or failed) or
2 (wrong usage).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from sparkdl.errors import SparkdlError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except SparkdlError as error:
        print(f"sparkdl: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparkdl", description="From Spark DataFrames to PyTorch models and back.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="what this machine has, and what really works on it")
    doctor.set_defaults(command=_doctor)
    return parser


def _doctor(_: argparse.Namespace) -> int:
    from sparkdl.doctor import checks

    console = Console()
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


if __name__ == "__main__":
    sys.exit(main())
