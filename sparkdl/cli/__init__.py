"""The command line: ``sparkdl init | check | plan | run | status | report | doctor | shards | models | size``.

Enters: words of a shell. Leaves: tables on standard output, and exit code 0 (fine), 1 (refused, as words that mean
nothing here are, or failed) or 130 (interrupted). The commands of a pipeline exit with the codes of
``pipeline/state/record.py``. Each family of commands has a file; ``words.py`` holds what they share.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sparkdl.cli import models, pipelines, shards, size
from sparkdl.cli.words import Parser, add_command, plain_text, print_error
from sparkdl.errors import SparkdlError

__all__ = ["job", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options, Console()))
    except SparkdlError as error:
        print_error(str(error))
        return 1
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130


def job(*words: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command on the file that ``--config`` names, as the jobs for ``spark-submit`` do; return its exit code.

    What ``spark-submit`` says of master, memory and settings wins over the section ``spark`` of the file.

    Args:
        words: the command and options of its own; those of the command line come after them, and win.
        arguments: the command line; None takes this process's.
    """
    finder = Parser(add_help=False, allow_abbrev=False, usage="%(prog)s --config FILE [options of sparkdl run]")
    finder.add_argument("--config", metavar="FILE")
    own_options, other_options = finder.parse_known_args(arguments)
    asks_for_help = {"-h", "--help"} & set(other_options)
    if own_options.config is None and not asks_for_help and not any(map(_is_file, other_options)):
        finder.error("--config FILE, the pipeline file, is missing")
    return main([*words, *([] if own_options.config is None else [own_options.config]), *other_options])


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="sparkdl", description="From Spark DataFrames to PyTorch models and back.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    pipelines.add_commands(commands)
    add_command(commands, "doctor", _doctor, "what this machine has, and what really works on it")
    shards.add_commands(commands)
    models.add_commands(commands)
    size.add_commands(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version, which is looked for only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from sparkdl.doctor import own_version

        print(f"sparkdl {own_version()}")
        parser.exit()


def _doctor(_: argparse.Namespace, console: Console) -> int:
    from sparkdl.doctor import checks

    table = Table("check", "found", "", "what to do", title="sparkdl doctor", title_justify="left")
    marks = {True: "[green]pass[/green]", False: "[red]FAIL[/red]", None: "[yellow]none[/yellow]"}
    failed = 0
    with console.status("checking; two ranks are started for each backend"):
        for check in checks():
            table.add_row(plain_text(check.name), plain_text(check.found), marks[check.ok], plain_text(check.remedy))
            failed += check.ok is False
    console.print(table)
    console.print("everything needed works" if not failed else f"{failed} of {table.row_count} checks failed")
    return 1 if failed else 0
