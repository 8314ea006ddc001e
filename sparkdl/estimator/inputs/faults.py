"""Whether a call of the user's code failed by what it was given, or by a fault of its own.

Enters: what a model or a loss raised when the driver tried it. Leaves: the line of the user's file that is at fault, or
None where the shapes and dtypes of the arguments are: then other parameters of the estimator may help.
"""

from __future__ import annotations

import dis
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from sparkdl.errors import LIBRARIES, ConfigError, SparkdlError

__all__ = ["making", "place_of_fault"]

_BY_ARGUMENTS = (RuntimeError, TypeError, ValueError, IndexError)
"""What torch and its kin raise where tensors do not fit an operation or a signature."""


def place_of_fault(error: Exception) -> str | None:
    """Return ``file:line`` where the user's code itself failed, None where its arguments plausibly do not fit.

    An operation that refuses its tensors is no fault of the code that calls it; neither is a call with the wrong number
    of arguments, which has run nothing yet. A name that does not exist is one, and so is what the user's own ``raise``
    says.
    """
    frames = _frames(error)
    own = _own(frames)
    explicit = bool(own) and own[-1] is frames[-1] and _raises(own[-1])
    if isinstance(error, _BY_ARGUMENTS) and not isinstance(error, NotImplementedError) and not explicit:
        return None
    return _line(own or frames)


@contextmanager
def making(parameter: str) -> Iterator[None]:
    """Let what the user's function raises, which makes the value of ``parameter``, be one sentence with its line.

    Raises:
        ConfigError: the block raised something untyped.
    """
    try:
        yield
    except SparkdlError:
        raise
    except Exception as error:
        frames = _frames(error)
        told, place = f"{type(error).__name__}: {error}", _line(_own(frames) or frames)
        raise ConfigError(f"the function given as {parameter} raised {told} at {place}: correct it there") from error


def _own(frames: list[TracebackType]) -> list[TracebackType]:
    return [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(LIBRARIES)]


def _line(frames: list[TracebackType]) -> str:
    place = traceback.extract_tb(frames[-1], limit=1)[0]
    return f"{place.filename}:{place.lineno}"


def _frames(error: Exception) -> list[TracebackType]:
    found, frame = [], error.__traceback__
    while frame is not None:
        found.append(frame)
        frame = frame.tb_next
    return found


def _raises(frame: TracebackType) -> bool:
    """Whether the frame stands at a ``raise`` or an ``assert``."""
    code = frame.tb_frame.f_code
    return any(one.offset == frame.tb_lasti and one.opname == "RAISE_VARARGS" for one in dis.get_instructions(code))
