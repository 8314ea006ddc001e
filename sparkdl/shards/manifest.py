"""The index of a shard set: what exists, where it lies, what it holds. A shard exists only if a manifest names it.

Enters: facts that the writers of single shards report. Leaves: one JSON file, committed last and whole, and frozen
values for everyone who reads: no Spark, no torch, no disk needed to plan from them.

On disk a set is a directory: ``manifest.json`` beside ``shards/*.arrow`` (or ``*.parquet``), and dictionaries of string
columns inside the manifest. The blocks of a shard are stored column-wise, so that a million of them load in seconds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.statistics import ColumnStats
from sparkdl.errors import IntegrityError, SchemaError, StorageError
from sparkdl.storage import Storage, xxh3_hex

__all__ = [
    "BlockInfo",
    "MANIFEST_NAME",
    "Manifest",
    "ShardInfo",
    "Source",
    "WRITER_VERSION",
    "schema_hash",
    "shard_from_json",
    "shard_to_json",
]

MANIFEST_NAME = "manifest.json"
WRITER_VERSION = 1
"""Version of the bytes that writers produce; part of every content key, so a new layout never hits an old cache."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One record batch (row group, for Parquet) of a shard.

    Attributes:
        rows: its rows, at least 1.
        bytes: length of its encapsulated message in the file, metadata and padding included.
        offset: where that message starts in the file.
        hash: xxh3-64 of these bytes, 16 hexadecimal digits.
    """

    rows: int
    bytes: int
    offset: int
    hash: str


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One file of the set.

    Attributes:
        path: relative to the set's URI.
        rows: sum over its blocks.
        bytes: size of the file.
        blocks: in file order.
    """

    path: str
    rows: int
    bytes: int
    blocks: tuple[BlockInfo, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the rows of a set came from, pinned: the same source always holds the same rows.

    Attributes:
        uri: of the table.
        version: of the table, as text.
        transformation: a name or hash of all that was done to the table before the rows were written: filters,
            derived columns, code version. With it a set is found again by any session, and whoever names it answers
            for it. Without it Spark's hash of the query takes its place, which holds within one Spark application.
    """

    uri: str
    version: str
    transformation: str = ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole index of one shard set.

    Attributes:
        uri: of the set; not stored in the file, so a set may be moved or copied.
        rows: of all shards.
        bytes: of all shard files.
        shards: in the order of the set.
        tensors: in the order of the Arrow schema, masks behind their tensors.
        statistics: by source column.
        schema_hash: of the tensors: equal hashes mean batches of the same names, dtypes and shapes.
        content_key: of source, columns, layout and settings; empty for a source that is not pinned.
        source: None if unknown.
        seed: of the row permutation inside blocks.
        format: ``"ipc"`` or ``"parquet"``.
        compression: None or ``"zstd"``.
        writer_version: of the layout of the bytes.
        created: seconds since the epoch.
    """

    rows: int
    bytes: int
    shards: tuple[ShardInfo, ...]
    tensors: tuple[TensorSpec, ...]
    statistics: Mapping[str, ColumnStats] = field(default_factory=dict)
    schema_hash: str = ""
    content_key: str = ""
    source: Source | None = None
    seed: int = 0
    format: str = "ipc"
    compression: str | None = None
    writer_version: int = WRITER_VERSION
    created: float = 0.0
    uri: str = field(default="", compare=False)

    def tensor(self, name: str) -> TensorSpec:
        """The tensor ``name``.

        Raises:
            SchemaError: the set has none of that name.
        """
        for spec in self.tensors:
            if spec.name == name:
                return spec
        names = ", ".join(spec.name for spec in self.tensors)
        raise SchemaError(f"shard set {self.uri} has no tensor {name!r}, only {names}: choose one of these")

    @property
    def dictionaries(self) -> dict[str, tuple[str, ...]]:
        """The dictionary of every string column: hand them to the writer of another set to get the same codes."""
        return {spec.columns[0]: spec.dictionary for spec in self.tensors if spec.logical == "string"}

    @property
    def content_hash(self) -> str:
        """A hash of every block: equal for sets of equal rows in equal order, whatever their files are called."""
        return xxh3_hex("".join(block.hash for shard in self.shards for block in shard.blocks).encode())

    def to_json(self) -> str:
        """Encode everything but ``uri``, with a hash of itself, so that a damaged manifest is noticed."""
        body: dict[str, Any] = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("uri", "shards", "tensors", "statistics", "source")
        }
        body["source"] = dataclasses.asdict(self.source) if self.source else None
        body["tensors"] = [dataclasses.asdict(spec) for spec in self.tensors]
        body["statistics"] = {name: dataclasses.asdict(stats) for name, stats in self.statistics.items()}
        body["shards"] = [shard_to_json(shard) for shard in self.shards]
        text = json.dumps(body, separators=(",", ":"))
        return json.dumps({"sparkdl_shards": 1, "hash": xxh3_hex(text.encode())})[:-1] + f',"manifest":{text}}}'

    @classmethod
    def from_json(cls, text: str, uri: str = "") -> Manifest:
        """Decode what ``to_json`` encoded.

        Raises:
            IntegrityError: the text is damaged.
            SchemaError: it was written by a newer sparkdl.
        """
        try:
            head, separator, body = text.partition(',"manifest":')
            envelope = json.loads(head + "}")
            body = body[:-1]
            if not separator or envelope["hash"] != xxh3_hex(body.encode()):
                raise IntegrityError(f"the manifest of {uri} differs from its own hash: write the set again")
            fields = json.loads(body)
        except (ValueError, KeyError, TypeError) as cause:
            raise IntegrityError(f"the manifest of {uri} cannot be decoded ({cause}): write the set again") from cause
        if fields["writer_version"] > WRITER_VERSION:
            version = fields["writer_version"]
            raise SchemaError(f"shard set {uri} has layout {version}, this sparkdl reads {WRITER_VERSION}: upgrade it")
        fields["shards"] = tuple(shard_from_json(shard) for shard in fields["shards"])
        fields["tensors"] = tuple(TensorSpec(**spec) for spec in fields["tensors"])
        fields["statistics"] = {name: ColumnStats(**stats) for name, stats in fields["statistics"].items()}
        fields["source"] = Source(**fields["source"]) if fields["source"] else None
        return cls(uri=uri, **fields)

    @classmethod
    def load(cls, uri: str | Storage) -> Manifest:
        """Read the manifest of the set at ``uri``.

        Raises:
            StorageError: there is no committed set, or it cannot be read.
            IntegrityError: the manifest is damaged.
        """
        root = Storage.of(uri)
        file = root.child(MANIFEST_NAME)
        if not file.exists():
            raise StorageError(f"{root.uri} holds no committed shard set: write one there with write_shards first")
        return cls.from_json(file.read_bytes().decode(), uri=root.uri)

    def commit(self, uri: str | Storage, *, overwrite: bool = False) -> Manifest:
        """Make the set visible: the one write after which it exists.

        Args:
            uri: of the set's directory.
            overwrite: replace a manifest that stands there.

        Returns:
            this manifest with its ``uri``.

        Raises:
            ConflictError: another set was committed there, and ``overwrite`` is off.
            StorageError: it cannot be written.
        """
        root = Storage.of(uri)
        data = self.to_json().encode()
        file = root.child(MANIFEST_NAME)
        if overwrite:
            file.write_atomic(data)
        else:
            file.write_if_absent(data)
        return dataclasses.replace(self, uri=root.uri)


def shard_to_json(shard: ShardInfo) -> dict[str, Any]:
    """Encode a shard, its blocks column-wise."""
    columns = list(zip(*((b.rows, b.bytes, b.offset, b.hash) for b in shard.blocks), strict=True)) or [(), (), (), ()]
    return {"path": shard.path, "rows": shard.rows, "bytes": shard.bytes, "blocks": columns}


def shard_from_json(shard: Mapping[str, Any]) -> ShardInfo:
    """Decode what ``shard_to_json`` encoded."""
    blocks = tuple(map(BlockInfo, *shard["blocks"]))
    return ShardInfo(shard["path"], shard["rows"], shard["bytes"], blocks)


def schema_hash(tensors: tuple[TensorSpec, ...]) -> str:
    """The hash of what a consumer of batches sees: names, dtypes, shapes, meanings, dictionaries."""
    seen = [(s.name, s.dtype, s.shape, s.ragged, s.columns, s.role, s.logical, s.scale, s.dictionary) for s in tensors]
    return xxh3_hex(json.dumps(seen).encode())
