"""The part that all commands share: their parsers, their exit codes, the spelling of sizes and times."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from sparkdl.compat.spark_errors import java_trace
from sparkdl.config import require
from sparkdl.errors import SparkdlError
from sparkdl.models.reference import reference, version_or_alias

Command = Callable[[argparse.Namespace, Console], int]
"""Takes the parsed words, prints, and returns the exit code."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command found or did.

    Attributes:
        value: for programs: dataclasses and plain values.
        view: for people.
        code: the exit code.
    """

    value: Any
    view: RenderableType
    code: int = 0


class Parser(argparse.ArgumentParser):
    """Refuses words with exit code 1; argparse's 2 means a cluster here, after which schedulers try again."""

    def error(self, message: str) -> NoReturn:
        """Say how the command is used, and what is wrong."""
        self.print_usage(sys.stderr)
        self.exit(1, f"{self.prog}: error: {message}\n")


def add_command(parent: Any, name: str, command: Command, text: str) -> argparse.ArgumentParser:
    """Add a command to a group of them; return its parser, for arguments of its own."""
    parser: argparse.ArgumentParser = parent.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    return parser


def with_exit_codes(
    command: Command,
) -> Command:
    """The command, with an error as one sentence on standard error and the exit code that it has in a record."""

    def run(options: argparse.Namespace, console: Console) -> int:
        from sparkdl.pipeline.state.record import exit_code_of
        from sparkdl.storage import outage_error

        try:
            return command(options, console)
        except (Exception, KeyboardInterrupt) as raised:
            error = outage_error(raised) or raised
            code = exit_code_of(error)
            if code == 4:
                traceback.print_exception(error)
                print(java_trace(error), end="", file=sys.stderr)
            text = str(error) if isinstance(error, SparkdlError) else " ".join(str(error).split())
            kind = "" if isinstance(error, SparkdlError) else f"{type(error).__name__}: "
            sentence = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{kind}{text}"
            print_error(sentence)
            return code

    return run


def print_error(sentence: str) -> None:
    """Say on standard error why a command ends."""
    print(f"sparkdl: {printable(sentence)}", file=sys.stderr)


def print_lines(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    """Print names beside texts."""
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        console.print(plain_text(f"{name:{width}}  {text}"), soft_wrap=True)


def printable(text: str) -> str:
    """A text from elsewhere, with what would steer a terminal, or turn the text around, as its escape."""
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


def plain_text(text: str) -> Text:
    """A text from elsewhere as it is: no markup, and ``printable``."""
    return Text(printable(text))


def table_of(titles: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> RenderableType:
    """Rows under titles; the words of ``empty`` where there are none."""
    table = Table(*(Column(plain_text(title), overflow="fold") for title in titles))
    for row in rows:
        table.add_row(*map(plain_text, row))
    return table if rows else plain_text(empty)


def shown(value: Any) -> str:
    """A value in a table; nothing for None."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def version_named(name: str, which: str | None) -> tuple[str, int | str]:
    """The model and its version or alias: ``NAME WHICH`` or ``NAME@WHICH``, and the champion where neither says."""
    model, inside = reference(name)
    require(inside is None or which is None, f"{name} and {which} both say which version: give one of them")
    return model, inside if inside is not None else "champion" if which is None else version_or_alias(which)


def time_text(when: float | datetime | None) -> str:
    """A time in UTC, to the minute."""
    if when is None:
        return ""
    return (when if isinstance(when, datetime) else datetime.fromtimestamp(when, UTC)).strftime("%Y-%m-%d %H:%M")
