"""A pipeline file, read and checked whole before anything starts.

Enters: the address of a file or its text, overrides of the command line, the environment. Leaves: a ``PipelineFile``,
or one ``PipelineFileError`` with a line for each place of the file that is wrong. Neither Spark nor torch is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as LocalPath
from typing import TYPE_CHECKING, Any

from msgspec import NODEFAULT

from sparkdl.errors import PipelineFileError
from sparkdl.pipeline.file.conflicts import contradictions
from sparkdl.pipeline.file.decode import Decoder, Path
from sparkdl.pipeline.file.environment import filled_in
from sparkdl.pipeline.file.kinds import fields_of, whole_file
from sparkdl.pipeline.file.names import each_by_name
from sparkdl.pipeline.file.overrides import overridden
from sparkdl.pipeline.file.places import completed
from sparkdl.pipeline.file.problems import Problems
from sparkdl.pipeline.file.resolved import plain
from sparkdl.pipeline.file.tree import MAX_BYTES, Section, parse
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PipelineFile", "load", "loads"]


@dataclass(frozen=True)
class PipelineFile:
    """A pipeline file that is sound.

    Attributes:
        name: what messages call the file.
        spec: what it says, with defaults, and addresses that hold from everywhere.
        places: where each value stands, such as ``churn.yaml:14``, by path.
    """

    name: str
    spec: PipelineSpec
    places: Mapping[Path, str] = field(repr=False, compare=False)

    def resolved(self) -> dict[str, Any]:
        """The whole file as JSON values, after overrides and defaults; secrets stay references to the environment."""
        found = plain(self.spec)
        assert isinstance(found, dict)
        return found

    def refused(self, found: Sequence[tuple[Path, str]]) -> PipelineFileError:
        """The error for values that turned out wrong only when they were used.

        Args:
            found: the path of each value, and the sentence that follows its name.
        """
        problems = Problems(self.name)
        decoder = Decoder(problems, dict(self.places))
        for path, sentence in found:
            decoder.wrong(path, sentence)
        return problems.error()

    def check_columns(
        self, source: Mapping[str, pa.DataType | None], transformed: Mapping[str, pa.DataType] | None = None
    ) -> None:
        """Hold the file against the columns that there are.

        Args:
            source: the type of each column of the source; None where it cannot be told.
            transformed: of each column that the transform makes of it; None if there is no transform, or if its
                columns are not known yet: then only what is read of the source itself is checked.

        Raises:
            PipelineFileError: columns are missing, or have types that their use does not fit.
        """
        from sparkdl.pipeline.file.columns import misfits

        found = list(misfits(self.spec, source, transformed))
        if found:
            raise self.refused(found)

    def columns_not_in(self, source: Mapping[str, pa.DataType | None]) -> list[str]:
        """The columns of the source that the file reads and ``source`` does not have, each once."""
        from sparkdl.pipeline.file.columns import read_of_source

        return [column for column in read_of_source(self.spec) if column not in source]


def load(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> PipelineFile:
    """Read a pipeline file.

    Args:
        path: its path or URI.
        overrides: ``section.key=value`` each, which win over the file.
        environment: what ``${NAME}`` takes values from; this process's variables by default.

    Raises:
        PipelineFileError: tells every line that is wrong.
        StorageError: the file cannot be read.
    """
    file = Storage.of(os.fspath(path))
    data = file.read_bytes(at_most=MAX_BYTES)
    folder, _, name = file.uri.rpartition("/")
    return _loaded(data, name, folder or "/", overrides, environment)


def loads(
    text: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    name: str = "pipeline.yaml",
    folder: str | os.PathLike[str] = ".",
) -> PipelineFile:
    """Read the text of a pipeline file; ``name`` and ``folder`` say where it would stand.

    Raises:
        PipelineFileError: tells every line that is wrong.
    """
    return _loaded(text.encode(), name, os.path.abspath(folder), overrides, environment)


def _loaded(
    data: bytes, name: str, folder: str, overrides: Sequence[str], environment: Mapping[str, str] | None
) -> PipelineFile:
    problems = Problems(name)
    root = parse(data, name, problems)
    if root is not None and not isinstance(root, Section):
        problems.add(f"{name}:1", "holds no sections at its top: begin with `source:`")
    if not isinstance(root, Section):
        raise problems.error()
    variables = os.environ if environment is None else environment
    filled = filled_in(root, variables, problems)
    assert isinstance(filled, Section)
    filled = each_by_name(filled, problems)
    for override in overrides:
        filled = overridden(filled, override, variables, problems)
    decoder = Decoder(problems)
    values, bad = decoder.fields(filled, whole_file(), ())
    sound = {**_defaults(), **values, "written": frozenset(filled.entries)}
    for path, sentence in contradictions({key: value for key, value in sound.items() if key not in bad}):
        decoder.wrong(path, sentence)
    if problems.found:
        raise problems.error()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", LocalPath(name).stem).strip("-._") or "pipeline"
    return PipelineFile(name, completed(PipelineSpec(**values), stem, folder), decoder.places)


def _defaults() -> dict[str, Any]:
    """What holds of sections that a file leaves out."""
    known = {name: one for name, one in fields_of(whole_file()).items() if not one.required}
    return {name: one.default if one.default is not NODEFAULT else one.default_factory() for name, one in known.items()}
