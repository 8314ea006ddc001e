"""Lineage both ways: from a model to the files it was trained on, from a table or a file of it to models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sparkdl.errors import ConfigError, SparkdlError
from sparkdl.models.registry.events import ModelVersion
from sparkdl.tables.delta import storage_of
from sparkdl.tables.table import Table

_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The origin of a model.

    Attributes:
        source_table: address of the table it was trained on.
        source_version: the version of it.
        code_version: of the training code, such as a commit.
        shard_key: content key of the shard set.
        parent: the version of the same model whose weights its training began with.
        versions: of the software; the bundle's own are added when it is published.
    """

    source_table: str | None = None
    source_version: int | None = None
    code_version: str | None = None
    shard_key: str | None = None
    parent: int | None = None
    versions: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLineage:
    """What a version was trained on.

    Attributes:
        name: of the model.
        version: its number.
        table: address or name of the table; None if it was not noted.
        table_version: of the table.
        files: that this version of the table is made of, paths below it; None where that cannot be told.
        missing: those of them that are gone, so that the version cannot be read any more.
        note: what could not be told, and why; empty if nothing.
        shard_key: content key of the shard set.
        code_version: of the training code.
        parent: the version of the same model that its training began with.
        software: versions of it.
    """

    name: str
    version: int
    table: str | None
    table_version: int | None
    files: tuple[str, ...] | None
    missing: tuple[str, ...]
    note: str
    shard_key: str | None
    code_version: str | None
    parent: int | None
    software: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedOn:
    """The models that were trained on a table, a version or a file of it.

    Attributes:
        versions: of models, by name and number.
        unknown: those that were trained on the table, where the log does not tell (any more) whether on this file.
    """

    versions: tuple[ModelVersion, ...]
    unknown: tuple[ModelVersion, ...] = ()


@dataclass(frozen=True)
class Reach:
    """How a registry reaches the tables that its models were trained on.

    Attributes:
        uri: of the registry.
        options: of its store, which are those of a table in the same kind of store.
    """

    uri: str
    options: Mapping[str, str] | None = field(default=None, repr=False)

    def table(self, text: str) -> Table:
        """The table of an address or name."""
        same = text.partition("://")[0] == self.uri.partition("://")[0]
        return Table(text, self.options if same else None)


def lineage_of(model: ModelVersion, reach: Reach) -> ModelLineage:
    """What a version was trained on."""
    table, version = _text(model.lineage.get("source_table")), _number(model.lineage.get("source_version"))
    files, note = (None, "no table was noted") if table is None else _files(table, version, reach)
    missing = _missing(str(table), files, reach) if files else ()
    if missing:
        note = f"{len(missing)} of {len(files or ())} files are gone: they were vacuumed, or moved away"
    software = model.lineage.get("versions")
    return ModelLineage(
        name=model.name,
        version=model.version,
        table=table,
        table_version=version,
        files=files,
        missing=missing,
        note=note,
        shard_key=_text(model.lineage.get("shard_key")),
        code_version=_text(model.lineage.get("code_version")),
        parent=_number(model.lineage.get("parent")),
        software={str(name): str(number) for name, number in software.items()} if isinstance(software, Mapping) else {},
    )


def trained_on(
    models: Iterable[ModelVersion],
    table: str,
    version: int | None,
    file: str | None,
    reach: Reach,
) -> TrainedOn:
    """Which versions of models were trained on a table.

    Args:
        models: all versions of the registry.
        table: its address or name.
        version: of the table; None: any.
        file: a path below the table, or its whole address; None: any.
        reach: how tables are reached.

    Raises:
        ConfigError: it is neither an address nor a name, and no model was noted with it.
    """
    by_table: dict[str, list[ModelVersion]] = {}
    for model in models:
        noted = _text(model.lineage.get("source_table"))
        if noted is not None:
            by_table.setdefault(noted, []).append(model)
    table_uri = table if table in by_table else reach.table(table).uri
    trained = [
        model
        for noted, versions in by_table.items()
        if table_uri in (noted, _address(noted, reach))
        for model in versions
        if version is None or _number(model.lineage.get("source_version")) == version
    ]
    trained.sort(key=lambda model: (model.name, model.version))
    if file is None:
        return TrainedOn(versions=tuple(trained))
    path = file.removeprefix(table_uri).lstrip("/") if file.startswith(table_uri) else file
    numbers = {_number(model.lineage.get("source_version")) for model in trained}
    files = {number: _files(table, number, reach)[0] for number in numbers}
    versions, unknown = [], []
    for model in trained:
        paths = files[_number(model.lineage.get("source_version"))]
        if paths is None:
            unknown.append(model)
        elif path in paths:
            versions.append(model)
    return TrainedOn(versions=tuple(versions), unknown=tuple(unknown))


def _address(table: str, reach: Reach) -> str:
    """A table's address as it is noted, or its name."""
    try:
        return reach.table(table).uri
    except ConfigError:  # noted by something else
        return table


# Which files a version of a table is made of is not noted with each model: the table's own log tells when asked.
def _files(table: str, version: int | None, reach: Reach) -> tuple[tuple[str, ...] | None, str]:
    """The files of a version of a table; None, and why, where they cannot be told."""
    if version is None:
        return None, f"no version of {table} was noted"
    try:
        return tuple(sorted(file.path for file in reach.table(table).files(version))), ""
    except SparkdlError as error:
        return None, f"the files of version {version} cannot be told: {error}"


def _missing(table: str, files: Sequence[str], reach: Reach) -> tuple[str, ...]:
    """The files that are gone; those of the newest version are there."""
    opened = reach.table(table)
    newest = {file.path for file in opened.files()}
    root = storage_of(opened.uri, opened.storage_options)
    older = [file for file in files if file not in newest]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sparkdl-lineage") as pool:
        present = pool.map(lambda file: root.child(file).exists(), older)
        return tuple(file for file, exists in zip(older, present, strict=True) if not exists)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
