"""The manifest of a shard set: what exists, where it lies, what it holds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from sparkdl.columns.spec import LOGICAL, TensorSpec
from sparkdl.columns.statistics import ColumnStats
from sparkdl.columns.types import DTYPES
from sparkdl.documents import typed as documents
from sparkdl.errors import SchemaError, StorageError
from sparkdl.storage import Storage, xxh3_hex
from sparkdl.storage.names import plain_name

MANIFEST_NAME = "manifest.json"
WRITER_VERSION = 2
"""Version of the bytes that writers produce; part of every content key, so a new layout never hits an old cache.

Version 1 kept decimals as integers, which a model would take for other numbers: its sets are refused.
"""
MAX_BYTES = 1 << 30
"""The most bytes of a manifest: some ten million blocks."""

MAX_BLOCK_ROWS = 1 << 20
"""Rows of a block: buffers are sized by it before the block is read."""

_Bytes = bytes  # inside Manifest the name is a field
_FORMAT, _BODY = 1, b',"manifest":'

_REPORT = documents.Source("the report of a task", "write the set again")
_Counts = tuple[documents.Count, ...]
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


@dataclass(frozen=True, slots=True)
class _Envelope:
    sparkdl_shards: documents.Count
    hash: str


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
    """The origin of the rows of a set, pinned: the same source always holds the same rows.

    Attributes:
        uri: of the table.
        version: of the table, as text.
        transformation: a name or hash of all that was done to the table before the rows were written: filters,
            derived columns, code version. With it a set is found again by any session, and whoever names it answers
            for it. Without it Spark's hash of the query takes its place, which holds within one Spark application.
        table_id: that the table got when it was made: another one may lie at its address later, or at another endpoint
            today, with a version of the same number.
    """

    uri: str
    version: str
    transformation: str = ""
    table_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole index of one shard set.

    A shard exists only if a manifest names it; it is one JSON file, committed last and whole. Whoever reads plans from
    it without Spark, torch or a disk. On disk a set is a directory: ``manifest.json`` beside ``shards/*.arrow`` (or
    ``*.parquet``), and dictionaries of string columns inside the manifest. The blocks of a shard are stored
    column-wise, so that a million of them load in seconds.

    Attributes:
        folder: where the set lies; not stored in the file, so a set may be moved or copied.
        rows: of all shards.
        bytes: of all shard files.
        shards: in the order of the set.
        tensors: in the order of the Arrow schema, masks behind their tensors.
        statistics: by source column.
        schema_hash: of the tensors: equal hashes mean batches of the same names, dtypes and shapes.
        content_key: of source, columns, layout and settings; empty for a source that is not pinned.
        source: None if unknown.
        spread: whether the rows lie in random order over the whole set; else in the order of what they came from.
        seed: of that order.
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
    spread: bool = False
    seed: int = 0
    format: str = "ipc"
    compression: str | None = None
    writer_version: int = WRITER_VERSION
    created: float = 0.0
    folder: Storage | None = field(default=None, compare=False, repr=False)

    @property
    def uri(self) -> str:
        """The address of the set; empty where it lies nowhere yet."""
        return "" if self.folder is None else self.folder.uri

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
        """Encode everything but ``folder``, with a hash of itself, so that a damaged manifest is noticed."""
        body = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "folder"}
        text = documents.encode({**body, "shards": [shard_to_json(shard) for shard in self.shards]}, nan=True)
        return (
            documents.encode({"sparkdl_shards": _FORMAT, "hash": xxh3_hex(text)})[:-1] + _BODY + text + b"}"
        ).decode()

    @classmethod
    def from_json(cls, text: str | _Bytes, folder: Storage | None = None) -> Manifest:
        """Decode what ``to_json`` encoded, of the set in ``folder``.

        Raises:
            IntegrityError: the text is damaged, or holds what no manifest does; the message names the field.
            SchemaError: it was written by another version of the writer.
        """
        uri = "" if folder is None else folder.uri
        source = documents.Source(f"the manifest of {uri}", "write the set again")
        head, separator, body = (text.encode() if isinstance(text, str) else text).partition(_BODY)
        body = body.removesuffix(b"}")
        if not separator:
            raise source.error("it is cut short")
        envelope = documents.decode(head + b"}", _Envelope, source)
        if envelope.hash != xxh3_hex(body):
            raise source.error("it differs from its own hash")
        fields = documents.parse(body, source, MAX_BYTES, nan=True)
        writer_version = fields.get("writer_version") if isinstance(fields, dict) else None
        for part, version, own_version in (
            ("format", envelope.sparkdl_shards, _FORMAT),
            ("layout", writer_version, WRITER_VERSION),
        ):
            if isinstance(version, int) and version != own_version:
                remedy = "upgrade sparkdl" if version > own_version else "write the set again"
                raise SchemaError(f"shard set {uri} has {part} {version}, this sparkdl reads {own_version}: {remedy}")
        return cls._of_fields(fields, folder, source)

    @classmethod
    def _of_fields(cls, fields: Any, folder: Storage | None, source: documents.Source) -> Manifest:
        stored = fields.get("shards") if isinstance(fields, dict) else None
        if not isinstance(stored, list):
            raise source.error("it lists no shards", "$.shards")
        shards = tuple(shard_from_json(shard, source, f"$.shards[{n}]") for n, shard in enumerate(stored))
        manifest = documents.convert({**fields, "shards": (), "folder": None}, cls, source)
        _check_settings(manifest, source)
        _check_tensors(manifest.tensors, source)
        _check_statistics(manifest.statistics, source)
        paths = [shard.path for shard in shards]
        if len(set(paths)) < len(paths):
            raise source.error("it names a file twice", "$.shards")
        for name, total in (
            ("rows", sum(shard_info.rows for shard_info in shards)),
            ("bytes", sum(shard_info.bytes for shard_info in shards)),
        ):
            if getattr(manifest, name) != total:
                raise source.error(f"{getattr(manifest, name)} is not the sum over its shards, {total}", f"$.{name}")
        return dataclasses.replace(manifest, shards=shards, folder=folder)

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
        return cls.from_json(file.read_bytes(at_most=MAX_BYTES), root)

    def commit(self, uri: str | Storage, *, overwrite: bool = False) -> Manifest:
        """Make the set visible: the one write after which it exists.

        Args:
            uri: of the set's directory.
            overwrite: replace a manifest that stands there.

        Returns:
            this manifest with its ``folder``.

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
        return dataclasses.replace(self, folder=root)


def shard_to_json(shard: ShardInfo) -> dict[str, Any]:
    """Encode a shard, its blocks column-wise."""
    columns = list(zip(*((b.rows, b.bytes, b.offset, b.hash) for b in shard.blocks), strict=True)) or [(), (), (), ()]
    return {"path": shard.path, "rows": shard.rows, "bytes": shard.bytes, "blocks": columns}


@dataclass(frozen=True, slots=True)
class _StoredShard:
    path: str
    rows: documents.Count
    bytes: documents.Count
    blocks: tuple[_Counts, _Counts, _Counts, tuple[_Hash, ...]]


def shard_from_json(shard: Any, source: documents.Source = _REPORT, root: str = "$") -> ShardInfo:
    """Decode what ``shard_to_json`` encoded.

    Args:
        shard: its plain values.
        source: the document they stand in, for messages.
        root: their path in it.

    Raises:
        IntegrityError: they are no shard, or its blocks do not fit into one file of its size.
    """
    stored = documents.convert(shard, _StoredShard, source, root)
    plain_name(stored.path, source.name)
    rows, sizes, offsets, hashes = stored.blocks
    if not len(rows) == len(sizes) == len(offsets) == len(hashes):
        raise source.error("its columns have different lengths", f"{root}.blocks")
    if sum(rows) != stored.rows or 0 in rows:
        raise source.error(
            f"{stored.rows} is not the sum over its blocks, {sum(rows)}, of at least a row", f"{root}.rows"
        )
    if max(rows, default=0) > MAX_BLOCK_ROWS:
        raise source.error(f"a block of {max(rows)} rows exceeds {MAX_BLOCK_ROWS}", f"{root}.blocks[0]")
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    if any(end > start for end, start in zip(ends, [*offsets[1:], stored.bytes], strict=True)) or 0 in sizes:
        raise source.error(f"its blocks overlap, or end behind its {stored.bytes} bytes", f"{root}.blocks")
    return ShardInfo(stored.path, stored.rows, stored.bytes, tuple(map(BlockInfo, rows, sizes, offsets, hashes)))


def _check_settings(manifest: Manifest, source: documents.Source) -> None:
    wrong = {
        "format": manifest.format not in ("ipc", "parquet"),
        "compression": manifest.compression not in (None, "zstd"),
        "seed": not -(2**63) <= manifest.seed < 2**64,
        "writer_version": manifest.writer_version < 0,
        "created": not 0 <= manifest.created < 2**40,
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise source.error(f"{getattr(manifest, name)!r} is nothing it can be", f"$.{name}")


def _check_tensors(tensors: tuple[TensorSpec, ...], source: documents.Source) -> None:
    names = [spec.name for spec in tensors]
    for position, spec in enumerate(tensors):
        wrong = {
            "name": not spec.name or names.count(spec.name) > 1,
            "dtype": spec.dtype not in (*DTYPES, "binary"),
            "shape": len(spec.shape) > 8 or min(spec.shape, default=0) < 0 or math.prod(spec.shape) >= 2**31,
            "columns": not spec.columns,
            "role": spec.role not in ("feature", "label", "mask"),
            "logical": spec.logical not in LOGICAL,
            "nulls": spec.nulls not in ("error", "fill", "mask"),
            "mask_of": spec.mask_of is not None and spec.mask_of not in names,
        }
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            raise source.error(f"{getattr(spec, name)!r} is nothing it can be", f"$.tensors[{position}].{name}")


def _check_statistics(statistics: Mapping[str, ColumnStats], source: documents.Source) -> None:
    """Buffers are sized by means and counts."""
    for name, stats in statistics.items():
        counts = (stats.count, stats.null_count, stats.nan_count, stats.inf_count)
        if min(counts) < 0 or (stats.mean is not None and not math.isfinite(stats.mean)):
            raise source.error(f"{stats} are no statistics of a column", f"$.statistics[{name!r}]")


def schema_hash(tensors: tuple[TensorSpec, ...]) -> str:
    """The hash of what a consumer of batches sees: names, dtypes, shapes, meanings, dictionaries."""
    visible_facts = [(s.name, s.dtype, s.shape, s.ragged, s.columns, s.role, s.logical, s.dictionary) for s in tensors]
    return xxh3_hex(json.dumps(visible_facts).encode())
