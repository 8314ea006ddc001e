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
from sparkdl.features.spec import Number
from sparkdl.pipeline.file.conflicts import contradictions
from sparkdl.pipeline.file.decode import Decoder, Path
from sparkdl.pipeline.file.environment import Environment, filled_in
from sparkdl.pipeline.file.kinds import fields_of, whole_file
from sparkdl.pipeline.file.names import each_by_name
from sparkdl.pipeline.file.overrides import overridden
from sparkdl.pipeline.file.places import completed
from sparkdl.pipeline.file.problems import Problems
from sparkdl.pipeline.file.resolved import HIDDEN, plain, shown, shown_setting
from sparkdl.pipeline.file.tree import MAX_BYTES, Listing, Scalar, Section, parse
from sparkdl.pipeline.spec import Label, PipelineSpec
from sparkdl.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PipelineFile", "draft", "load", "loads"]


_LEAST_SECRET = 6


@dataclass(frozen=True)
class PipelineFile:
    """A pipeline file that is sound.

    Attributes:
        name: what messages call the file.
        spec: what it says, with defaults, and addresses that hold from everywhere.
        places: where each value stands, such as ``churn.yaml:14``, by path.
        replaced: sections in whose place defaults stand, since they are not sound; see ``draft``.
        references: the texts that name variables of the environment, by the path of what these made of it.
        variables: what these hold, by name, but for those of ``show_variables``.
    """

    name: str
    spec: PipelineSpec
    places: Mapping[Path, str] = field(repr=False, compare=False)
    replaced: frozenset[str] = frozenset()
    references: Mapping[Path, str] = field(default_factory=dict, repr=False, compare=False)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"PipelineFile(name={self.name!r}, {self.resolved()})"

    def resolved(self) -> dict[str, Any]:
        """The whole file as JSON values that anybody may see, after overrides and defaults.

        Texts that came from the environment are shown as ``${NAME}``, unless ``show_variables`` names the variable;
        options and Spark's settings by a list of harmless names; literals of SQL not at all.
        """
        return dict(shown(self.spec, self.references))

    def deciding(self) -> dict[str, Any]:
        """The same with the values that decide what is done: for keys alone, of which nothing but a hash is kept."""
        return dict(plain(self.spec))

    def redacted(self, message: str) -> str:
        """A message as anybody may see it: values of variables as ``${NAME}``, hidden options and settings hidden.

        Values of fewer than six characters stay, for they stand in any text.
        """
        hidden = {value: f"${{{name}}}" for name, value in self.variables.items()}
        free = {**getattr(self.spec.source, "options", {}), **self.spec.spark.conf}
        hidden |= {
            value: HIDDEN
            for name, value in free.items()
            if isinstance(value, str) and value not in hidden and shown_setting(name, value) == HIDDEN
        }
        for value in sorted(hidden, key=len, reverse=True):
            message = message.replace(value, hidden[value]) if len(value) >= _LEAST_SECRET else message
        return message

    def refused(self, found: Sequence[tuple[Path, str]]) -> PipelineFileError:
        """The error for values that turned out wrong only when they were used.

        Args:
            found: the path of each value, and the sentence that follows its name.
        """
        problems = Problems(self.name)
        self.add(found, problems)
        return problems.error()

    def add(self, found: Sequence[tuple[Path, str]], problems: Problems) -> None:
        """Add what else was ``found`` to the problems of the file, but for sections that stand in others' places."""
        decoder = Decoder(problems, dict(self.places))
        for path, sentence in found:
            if path[0] not in self.replaced:
                decoder.wrong(path, sentence)

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
    return _sound(*draft(path, overrides, environment))


def draft(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[PipelineFile | None, Problems]:
    """Read a pipeline file as far as it is sound, so that what is left can be held against its source, too.

    Returns:
        the file, with defaults where a section is not sound, None where there is no source to hold it against; and what
        is wrong with it.

    Raises:
        StorageError: the file cannot be read.
    """
    file = Storage.of(os.fspath(path))
    data = file.read_bytes(at_most=MAX_BYTES)
    folder, _, name = file.uri.rpartition("/")
    return _loaded(data, name, folder or "/", overrides, environment)


def _sound(file: PipelineFile | None, problems: Problems) -> PipelineFile:
    if problems.found or file is None:
        raise problems.error()
    return file


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
    return _sound(*_loaded(text.encode(), name, os.path.abspath(folder), overrides, environment))


def _loaded(
    data: bytes, name: str, folder: str, overrides: Sequence[str], environment: Mapping[str, str] | None
) -> tuple[PipelineFile | None, Problems]:
    problems = Problems(name)
    root = parse(data, name, problems)
    if root is not None and not isinstance(root, Section):
        problems.add(f"{name}:1", "holds no sections at its top: begin with `source:`")
    if not isinstance(root, Section):
        return None, problems
    for override in overrides:
        if override.partition("=")[0].strip() == "show_variables":  # which decides how the others are shown
            root = overridden(root, override, Environment({}), problems)
    variables = Environment(os.environ if environment is None else environment, _harmless(root))
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
    replaced = frozenset(bad & {*_PLACEHOLDERS, *_defaults()})
    for section in replaced:
        values[section] = decoder.sound.get((section,)) or _PLACEHOLDERS.get(section) or _defaults()[section]
    replaced -= {path[0] for path, kept in decoder.sound.items() if kept}
    if "source" in bad:
        return None, problems
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", LocalPath(name).stem).strip("-._") or "pipeline"
    spec = completed(PipelineSpec(**values), stem, folder)
    references = _with_derived(decoder.references, spec)
    return PipelineFile(name, spec, decoder.places, replaced, references, variables.used), problems


_PLACEHOLDERS: Mapping[str, Any] = {"features": {"_": Number()}, "label": {"_": Label(type="regression")}}
"""What stands for sections without which there is no pipeline."""


def _harmless(root: Section) -> tuple[str, ...]:
    """The variables whose values may be shown; what stands there instead of names is told with the other fields."""
    named = root.entries.get("show_variables")
    items = named.items if isinstance(named, Listing) else (named,)
    return tuple(item.value for item in items if isinstance(item, Scalar) and isinstance(item.value, str))


def _with_derived(references: Mapping[Path, str], spec: PipelineSpec) -> dict[Path, str]:
    """With what follows from ``root`` and ``name`` where these name variables, and from a registry that does."""
    root, name = references.get(("root",), spec.root), references.get(("name",), str(spec.name))
    derived: dict[Path, str] = {("publish", "name"): name} if spec.publish.name == spec.name else {}
    for place in ("tables", "shards", "registry", "runs"):
        if getattr(spec.places, place) == f"{spec.root}/{spec.name}/{place}":
            derived["places", place] = f"{root}/{name}/{place}"
    derived |= references
    registry = derived.get(("publish", "registry"), derived.get(("places", "registry")))
    if registry is not None:
        derived["publish", "registry"] = derived["places", "registry"] = registry
    if spec.score.target == f"{spec.places.tables}/predictions":
        tables = derived.get(("places", "tables"), spec.places.tables)
        derived.setdefault(("score", "target"), f"{tables}/predictions")
    return derived


def _defaults() -> dict[str, Any]:
    """What holds of sections that a file leaves out."""
    known = {name: one for name, one in fields_of(whole_file()).items() if not one.required}
    return {name: one.default if one.default is not NODEFAULT else one.default_factory() for name, one in known.items()}
