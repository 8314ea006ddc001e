"""A pipeline file, read and checked before anything starts; neither Spark nor torch is loaded for it."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as LocalPath
from typing import TYPE_CHECKING, Any

from msgspec import NODEFAULT, inspect, structs

from sparkdl.errors import PipelineFileError
from sparkdl.features.spec import Number
from sparkdl.pipeline.file.conflicts import contradictions
from sparkdl.pipeline.file.decode import Decoder, alternatives, fields_of, sections_of, spelled_out, whole_file
from sparkdl.pipeline.file.environment import Environment
from sparkdl.pipeline.file.problems import Path, Problems, without_values
from sparkdl.pipeline.file.resolved import HIDDEN, plain, shown, shown_setting
from sparkdl.pipeline.file.tree import MAX_BYTES, Listing, Node, Section, flow, lines_by_path, parse
from sparkdl.pipeline.spec import HashSplit, Label, PipelineSpec, TimeSplit
from sparkdl.storage import Storage
from sparkdl.storage.address import looks_like_a_table

if TYPE_CHECKING:
    import pyarrow as pa

_RANGE = re.compile(r"(?P<stem>.*?)(?P<first>\d+)\.\.(?P=stem)(?P<last>\d+)")
MAX_COLUMNS = 10_000
_PLACES = ("tables", "shards", "registry", "runs")


@dataclass(frozen=True)
class PipelineFile:
    """A pipeline file that is valid.

    Attributes:
        name: what messages call the file.
        spec: what it says, with defaults, and addresses that hold from everywhere.
        lines: where each value stands, such as ``churn.yaml:14``, by path.
        replaced: sections in whose place defaults stand, since they are not valid; see ``draft``.
        references: the texts that name variables of the environment, by the path of what these made of it.
        variables: what these hold, by name, but for those of ``show_variables``.
    """

    name: str
    spec: PipelineSpec
    lines: Mapping[Path, str] = field(repr=False, compare=False)
    replaced: frozenset[str] = frozenset()
    references: Mapping[Path, str] = field(default_factory=dict, repr=False, compare=False)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"PipelineFile(name={self.name!r}, {self.resolved()})"

    def resolved(self) -> dict[str, Any]:
        """The file as JSON values that anybody may see, after overrides and defaults.

        Texts that came from the environment are shown as ``${NAME}``, unless ``show_variables`` names the variable;
        options and Spark's settings by a list of harmless names; literals of SQL not at all.
        """
        return shown(self.spec, self.references)

    def deciding(self) -> dict[str, Any]:
        """The same with the values that decide what is done: for keys alone, of which nothing but a hash is kept."""
        return plain(self.spec)

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
        return without_values(message, hidden)

    def refused(self, mistakes: Sequence[tuple[Path, str]]) -> PipelineFileError:
        """The error for values that turned out wrong only when they were used.

        Args:
            mistakes: the path of each value, and the sentence that follows its name.
        """
        problems = Problems(self.name, dict(self.lines), variables=self.variables)
        self.add(mistakes, problems)
        return problems.error()

    def add(self, mistakes: Sequence[tuple[Path, str]], problems: Problems) -> None:
        """Add further mistakes to the problems of the file, but for those in sections that defaults replace."""
        for path, sentence in mistakes:
            if path[0] not in self.replaced:
                problems.add_value(path, sentence)

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

        mistakes = list(misfits(self.spec, source, transformed))
        if mistakes:
            raise self.refused(mistakes)


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
    return _valid(*draft(path, overrides, environment))


def draft(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[PipelineFile | None, Problems]:
    """Read a pipeline file as far as it is valid, so that what is left can be held against its source, too.

    Returns:
        the file, with defaults where a section is not valid, None where there is no source to hold it against; and what
        is wrong with it.

    Raises:
        StorageError: the file cannot be read.
    """
    file = Storage.of(os.fspath(path))
    data = file.read_bytes(at_most=MAX_BYTES)
    folder, _, name = file.uri.rpartition("/")
    return _read(data, name, folder or "/", overrides, environment)


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
    return _valid(*_read(text.encode(), name, os.path.abspath(folder), overrides, environment))


def _valid(file: PipelineFile | None, problems: Problems) -> PipelineFile:
    if problems.sentences or file is None:
        raise problems.error()
    return file


def _read(
    data: bytes, name: str, folder: str, overrides: Sequence[str], environment: Mapping[str, str] | None
) -> tuple[PipelineFile | None, Problems]:
    """Make a checked file of bytes; each stage adds its problems, and the next one goes on with what is valid."""
    problems = Problems(name)
    tree = parse(data, name, problems)
    if not isinstance(tree, Section):
        if tree is not None:
            problems.add(f"{name}:1", "holds no sections at its top: begin with `source:`")
        return None, problems

    tree = one_feature_a_key(tree, problems)
    for override in overrides:
        tree = overridden(tree, override, problems)
    problems.lines.update(lines_by_path(tree))
    variables = Environment(os.environ if environment is None else environment, _shown_variables(tree))
    problems.variables = variables.used

    decoder = Decoder(problems, variables)
    sections, invalid = decoder.fields(tree, whole_file(), ())
    defaults = {
        section: option.default if option.default is not NODEFAULT else option.default_factory()
        for section, option in fields_of(whole_file()).items()
        if not option.required
    }
    checked = {**defaults, **sections, "written": frozenset(tree)}
    for path, sentence in contradictions({key: value for key, value in checked.items() if key not in invalid}):
        problems.add_value(path, sentence)
    if "source" in invalid:
        return None, problems

    replacements = {**defaults, **_PLACEHOLDERS}
    replaced = frozenset(invalid & replacements.keys())
    for section in replaced:
        sections[section] = decoder.valid.get((section,)) or replacements[section]
    partly_valid = {path[0] for path, values in decoder.valid.items() if values}
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", LocalPath(name).stem).strip("-._") or "pipeline"
    spec = completed(PipelineSpec(**sections), stem, folder)
    references = _with_derived(decoder.references, spec)
    return PipelineFile(name, spec, problems.lines, replaced - partly_valid, references, variables.used), problems


_PLACEHOLDERS: Mapping[str, Any] = {"features": {"_": Number()}, "label": {"_": Label(type="regression")}}
"""What stands for sections without which there is no pipeline."""


def _shown_variables(tree: Section) -> tuple[str, ...]:
    """The variables whose values may be shown; what stands there instead of names is told with the other fields."""
    option = tree.get("show_variables")
    return tuple(name for name in (option if isinstance(option, Listing) else [option]) if isinstance(name, str))


def _with_derived(references: Mapping[Path, str], spec: PipelineSpec) -> dict[Path, str]:
    """The references, with those of places that follow from ``root``, ``name`` or a registry that names a variable."""
    root, name = references.get(("root",), spec.root), references.get(("name",), str(spec.name))
    derived: dict[Path, str] = {("publish", "name"): name} if spec.publish.name == spec.name else {}
    for place_name in _PLACES:
        if getattr(spec.places, place_name) == f"{spec.root}/{spec.name}/{place_name}":
            derived["places", place_name] = f"{root}/{name}/{place_name}"
    derived |= references
    registry = derived.get(("publish", "registry"), derived.get(("places", "registry")))
    if registry is not None:
        derived["publish", "registry"] = derived["places", "registry"] = registry
    if spec.score.target == f"{spec.places.tables}/predictions":
        tables = derived.get(("places", "tables"), spec.places.tables)
        derived.setdefault(("score", "target"), f"{tables}/predictions")
    return derived


# Values of the command line, put into the tree of a file: ``train.epochs=3``, ``features.age.log=true``


def overridden(tree: Section, override: str, problems: Problems) -> Section:
    """Return ``tree`` with one value set, as ``key.path=value`` says; the value is YAML of one line."""
    path, sign, text = override.partition("=")
    path = path.strip()
    if not sign or not path:
        problems.add(f"override {override}", "sets nothing: write it as section.key=value")
        return tree
    line = f"override {path}"
    changed = _with_value(tree, whole_file(), path, flow(text, line, problems), line, problems)
    assert isinstance(changed, Section)
    return changed


def _with_value(node: Node, kind: inspect.Type, path: str, value: Node, line: str, problems: Problems) -> Node:
    if not path:
        return value
    kinds, sections = alternatives(kind), sections_of(kind)
    mapping = next((inner for inner in kinds if isinstance(inner, inspect.DictType)), None)
    section = spelled_out(node, kind)
    if not isinstance(section, Section):
        section = Section({}, {})
    # keys of the user's own may have dots in them, unless they name sections
    named = bool(sections)
    if mapping is not None:
        named = all(isinstance(inner, inspect.StructType) for inner in alternatives(mapping.value_type))
    written = [key for key in section if f"{path}.".startswith(f"{key}.")]
    key = max(written, key=len) if written else path.partition(".")[0] if named else path
    if mapping is not None:
        inner: inspect.Type | None = mapping.value_type
    elif sections:
        fields = {name: option.type for section_type in sections for name, option in fields_of(section_type).items()}
        inner = inspect.StrType() if key == sections[0].tag_field else fields.get(key)
    else:
        inner = kind if inspect.AnyType() in kinds else None
    if inner is None and not sections:
        problems.add(line, f"sets {path} of a value that holds no keys: leave .{path} out")
        return node
    # an unknown key of a section is complained of with those of the file
    inner_path = path[len(key) + 1 :]
    entry = value if inner is None else _with_value(section.get(key), inner, inner_path, value, line, problems)
    kept = inner_path and isinstance(section.get(key), Section)
    return Section({**section, key: entry}, section.lines if kept else {**section.lines, key: line})


# Several columns under one key of ``features``: ``I1..I13`` counts, ``age, income`` lists


def one_feature_a_key(tree: Section, problems: Problems) -> Section:
    """Return the file's tree with every feature under a key of its own; one that is named is no part of a range."""
    features = tree.get("features")
    if not isinstance(features, Section) or not any(".." in key or "," in key for key in features):
        return tree
    # a section that is the same for several columns is told once: a bare text becomes one
    sections = {key: Section({"type": node}, {}) if isinstance(node, str) else node for key, node in features.items()}
    parts = [(part.strip(), key) for key in features for part in key.split(",")]
    named = {part for part, _ in parts if not _RANGE.fullmatch(part)}
    by_name: dict[str, Node] = {}
    lines: dict[str, str] = {}
    for part, key in parts:
        line = features.lines[key]
        for name in _names(part, line, problems):
            if name in named and name != part:
                continue
            if name in by_name:
                problems.add(line, f"features.{name} stands at {lines[name]} already: keep one of the two")
            by_name.setdefault(name, sections[key])
            lines.setdefault(name, line)
        if len(by_name) > MAX_COLUMNS:
            problems.add(line, f"features.{part} makes more than {MAX_COLUMNS} features: gather them in vectors")
            break
    return Section({**tree, "features": Section(by_name, lines)}, tree.lines)


def _names(part: str, line: str, problems: Problems) -> list[str]:
    span = _RANGE.fullmatch(part)
    if span is None:
        return [part]
    first, last = int(span["first"]), int(span["last"])
    if not 0 < last - first < MAX_COLUMNS:
        problems.add(line, f"features.{part} counts from {first} to {last}: count upwards, by less than {MAX_COLUMNS}")
        return []
    width = len(span["first"]) if span["first"].startswith("0") else 0
    return [f"{span['stem']}{number:0{width}d}" for number in range(first, last + 1)]


# What a file leaves out, or says relative to the folder that it lies in


def completed(spec: PipelineSpec, name: str, folder: str) -> PipelineSpec:
    """Return ``spec`` with defaults that follow from other values filled in.

    Args:
        spec: what the file says.
        name: of the pipeline, where it says none.
        folder: that the file lies in, an absolute path or a URI.
    """
    name = spec.name or name
    source = _moved(spec.source, spec.source.addresses, folder)
    root = beside(spec.root, folder)
    places = _moved(spec.places, _PLACES, folder)
    defaults = {kind: f"{root}/{name}/{kind}" for kind in _PLACES if getattr(places, kind) is None}
    places = structs.replace(places, **defaults)
    publish, score = _moved(spec.publish, ("registry",), folder), _moved(spec.score, ("target",), folder)
    publish = structs.replace(
        publish, name=publish.name or name, registry=publish.registry or places.registry, label=spec.judged_label
    )
    split = spec.split or (TimeSplit() if source.when else HashSplit())
    if isinstance(split, HashSplit):
        split = structs.replace(split, group=split.group or source.key)
    return structs.replace(
        spec,
        name=name,
        root=root,
        places=structs.replace(places, registry=publish.registry),
        code=spec.code if _absolute(spec.code) else _joined(folder, spec.code),
        source=source,
        split=split,
        publish=publish,
        score=structs.replace(score, target=score.target or f"{places.tables}/predictions"),
    )


def beside(text: str, folder: str) -> str:
    """The address that ``text`` means in a file that lies in ``folder``; names of tables and absolute ones stay."""
    if looks_like_a_table(text) or _absolute(text):
        return text.rstrip("/") or "/"
    joined = _joined(folder, text)
    return joined if "://" in joined else f"file://{joined}"


def _absolute(text: str) -> bool:
    return text.startswith(("/", "~", "file:", "dbfs:")) or "://" in text


def _joined(folder: str, text: str) -> str:
    if "://" not in folder:
        return os.path.normpath(os.path.join(folder, text))
    scheme, _, location = folder.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(location, text))}"


def _moved(section: Any, names: tuple[str, ...], folder: str) -> Any:
    written = {name: getattr(section, name) for name in names if getattr(section, name, None)}
    moved = {
        name: beside(value, folder) if isinstance(value, str) else tuple(beside(text, folder) for text in value)
        for name, value in written.items()
    }
    return structs.replace(section, **moved)
