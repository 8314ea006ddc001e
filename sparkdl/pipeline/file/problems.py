"""What is wrong with a file, collected, so that one error tells all of it; and the word that was likely meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sparkdl.errors import PipelineFileError

Path = tuple[str | int, ...]
"""The keys and positions that lead to a value."""
_LISTED, _LEAST_SECRET = 12, 6


def dotted(path: Path) -> str:
    """A path as messages write it: ``search.space.train.epochs[1]``."""
    return re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else part for part in path))


@dataclass
class Problems:
    """The problems of one file.

    Attributes:
        name: of the file.
        lines: where the value of each path stands, such as ``churn.yaml:14``.
        sentences: (line, sentence) of each problem.
        variables: of the environment, whose values no sentence shows, by name.
    """

    name: str
    lines: dict[Path, str] = field(default_factory=dict)
    sentences: list[tuple[str, str]] = field(default_factory=list)
    variables: Mapping[str, str] = field(default_factory=dict)

    def add(self, line: str, sentence: str) -> None:
        """Add a problem, unless it is there already."""
        sentence = without_values(sentence, {value: f"${{{name}}}" for name, value in self.variables.items()})
        if (line, sentence) not in self.sentences:
            self.sentences.append((line, sentence))

    def add_value(self, path: Path, sentence: str) -> None:
        """Add a problem of the value at ``path``, with its line or else that of the section around it."""
        outer = path
        while outer and outer not in self.lines:
            outer = outer[:-1]
        self.add(self.lines.get(outer, self.name), f"{dotted(path)}{sentence}")

    def error(self) -> PipelineFileError:
        """The one error that tells all problems, in the order of the file; those without a line come last."""
        ordered = sorted(self.sentences, key=lambda problem: _line_number(problem[0]))
        return PipelineFileError(self.name, tuple(f"{line}: {sentence}" for line, sentence in ordered))


def without_values(message: str, stand_ins: Mapping[str, str]) -> str:
    """A message with what stands for each value in its place; those below six characters stay, as any text has them."""
    for value in sorted(stand_ins, key=len, reverse=True):
        message = message.replace(value, stand_ins[value]) if len(value) >= _LEAST_SECRET else message
    return message


def _line_number(line: str) -> tuple[bool, int]:
    number = re.search(r":(\d+)$", line)
    return number is None, int(number[1]) if number else 0


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate that was most likely meant; None if none is near."""
    by_letters = {_letters(candidate): candidate for candidate in candidates}
    near = difflib.get_close_matches(_letters(word), by_letters, n=1, cutoff=cutoff)
    return by_letters[near[0]] if near else None


def near_column(word: str, columns: Iterable[str]) -> str | None:
    """The column that was most likely meant: another case or punctuation, or one letter in four is wrong.

    People's own words are near each other by chance, as ``hours`` and ``house`` are; keys of the file are not.
    """
    by_letters = {_letters(column): column for column in columns}
    letters = _letters(word)
    near = difflib.get_close_matches(letters, by_letters, n=5, cutoff=0.6)
    nearest_first = sorted((_edits(letters, candidate), candidate) for candidate in near)
    allowed = max(1, len(letters) // 4)
    return by_letters[nearest_first[0][1]] if near and nearest_first[0][0] <= allowed else None


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


def choices(word: str, candidates: Iterable[str], *, columns: bool = False) -> str:
    """What to write instead of ``word``: the nearest candidate, or else all; ``columns`` says that they are columns."""
    names = list(candidates)
    near = near_column(word, names) if columns else nearest(word, names)
    if near is not None:
        return f"write {near}"
    return f"choose one of {listed(names)}" if names else "leave it out"


def listed(names: Sequence[str]) -> str:
    """Names with commas, the first dozen of many."""
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _letters(word: str) -> str:
    return word.replace("_", "").replace("-", "").lower()
