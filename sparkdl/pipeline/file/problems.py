"""What is wrong with a file, collected, so that one error tells all of it.

Enters: places and sentences. Leaves: one ``PipelineFileError``, sorted as the file is; and the nearest right word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from sparkdl.errors import PipelineFileError

__all__ = ["Problems", "choices", "near_column", "nearest"]

_SHOWN = 12


@dataclass
class Problems:
    """What was found so far.

    Attributes:
        name: of the file.
        found: (place, sentence) each.
    """

    name: str
    found: list[tuple[str, str]] = field(default_factory=list)

    def add(self, at: str, sentence: str) -> None:
        """Take one more; the same again is one."""
        if (at, sentence) not in self.found:
            self.found.append((at, sentence))

    def error(self) -> PipelineFileError:
        """The one error that tells all of it."""
        lines = [f"{at}: {sentence}" for at, sentence in sorted(self.found, key=lambda one: _line(one[0]))]
        return PipelineFileError(self.name, tuple(lines))


def _line(at: str) -> tuple[bool, int]:
    number = re.search(r":(\d+)$", at)
    return number is None, int(number[1]) if number else 0


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The word among ``known`` that was most likely meant; None if none is near."""
    plain = {_plain(one): one for one in known}
    near = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def near_column(word: str, columns: Iterable[str]) -> str | None:
    """The column that was most likely meant: another case or punctuation, or one letter in four is wrong.

    People's own words are near each other by chance, as ``hours`` and ``house`` are; keys of the file are not.
    """
    plain = {_plain(one): one for one in columns}
    wanted = _plain(word)
    near = [(_edits(wanted, one), one) for one in difflib.get_close_matches(wanted, plain, n=5, cutoff=0.6)]
    allowed = max(1, len(wanted) // 4)
    best = min(near, default=(allowed + 1, ""))
    return plain[best[1]] if best[0] <= allowed else None


def _edits(first: str, second: str) -> int:
    """Letters to change, insert, delete or swap with the next, after Damerau (optimal string alignment)."""
    rows = [list(range(len(second) + 1))]
    for i, a in enumerate(first, 1):
        row = [i]
        for j, b in enumerate(second, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b)))
            if i > 1 and j > 1 and (a, b) == (second[j - 2], first[i - 2]):
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


def choices(word: str, known: Iterable[str], *, columns: bool = False) -> str:
    """What to write instead of ``word``: the nearest, or all there are; ``columns`` says that these are columns."""
    names = list(known)
    near = near_column(word, names) if columns else nearest(word, names)
    if near is not None:
        return f"write {near}"
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"choose one of {shown}" if names else "leave it out"


def _plain(word: str) -> str:
    return word.replace("_", "").replace("-", "").lower()
