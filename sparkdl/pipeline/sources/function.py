"""A function of the user's that makes the rows, and is called once more for the time of windows that are due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError, DataError, SparkdlError, first_line
from sparkdl.pipeline.code import code_hash, imported
from sparkdl.pipeline.sources.base import Source, SourceSnapshot
from sparkdl.pipeline.spec.source import FunctionSource
from sparkdl.pipeline.windows import Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class RowsFunction(Source):
    """A function, which has to return the same rows with a window and without."""

    section: FunctionSource
    rows_may_change = False

    def frame(self, spark: SparkSession, snapshot: SourceSnapshot) -> DataFrame:
        """All rows."""
        return frame_of("source.function", self.section.function, spark, None, **self.section.arguments)

    def frame_within(self, spark: SparkSession, span: Span) -> DataFrame:
        """What it returns when it is asked for a span of time."""
        return frame_of("source.function", self.section.function, spark, span, **self.section.arguments)

    def check_within(self, everything: Mapping[str, str], within: Mapping[str, str]) -> None:
        """Refuse a function that returns other rows of a window when it is asked for windows than for all."""
        for name, rows in everything.items():
            if within.get(name) != rows:
                raise DataError(
                    f"source.function={self.section.function} returns other rows of the window {name} with a window "
                    "and without: leave out only what lies before window.start, or not before window.end"
                )

    def identity(self) -> list[Any]:
        """The identity of any source, with the function's code."""
        name, settings, _ = super().identity()
        return [name, settings, code_hash(self.section.function)]


def frame_of(what: str, target: str, *given: Any, **arguments: Any) -> DataFrame:
    """The DataFrame that a function of the user's returns.

    Args:
        what: the function's key in the file.
        target: the function, ``package.module:function``.
        given: its positional arguments.
        arguments: those by name.

    Raises:
        ConfigError: it cannot be imported, fails, or returns something else.
    """
    from pyspark.sql import DataFrame as Frame

    function = imported(target, what)
    try:
        frame = function(*given, **arguments)
    except SparkdlError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}={target} failed: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(frame, Frame):
        raise ConfigError(f"{what}={target} returned a {type(frame).__name__}: return a DataFrame of its session")
    return frame
