"""Rows at random over the whole set, the same whatever partitions they came in, as sorted tables need."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.columns.convert import Rows
from sparkdl.columns.numpy_arrow import from_numpy, to_numpy
from sparkdl.columns.row_hash import mixed
from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.types import arrow_schema
from sparkdl.config import ShardConfig
from sparkdl.errors import StorageError
from sparkdl.shards.blocks import concatenate, from_batch, permuted, row_ends, to_batch
from sparkdl.shards.manifest import ShardInfo, shard_from_json, shard_to_json
from sparkdl.shards.shard_file import ShardWriter
from sparkdl.storage import Storage, storage_errors

Words = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]
Part = tuple[Rows, Words, Counts]
"""Rows with their keys and copies."""

Stage = Callable[[Callable[[int], Any], int], list[Any]]

_RUN_BYTES = 64 << 20
_SLICES = 64
"""Record batches of a run: each holds the keys of one 64th of their range."""

_KEY, _COPIES = "sparkdl.key", "sparkdl.copies"
_AT_ONCE = 1 << 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Run:
    """A file of rows that are sorted by key.

    Attributes:
        path: below the root of the set.
        rows: copies included.
        bytes: of all rows, copies included, as tensors.
        most: copies of its commonest row.
        slices: of each record batch, the 64th of the range of keys that it holds.
    """

    path: str
    rows: int
    bytes: int
    most: int
    slices: tuple[int, ...]


class CommonReport(TypedDict):
    """The common rows among the keys of one bucket: where they lie, their keys, ascending, and copies."""

    path: str
    keys: list[int]
    copies: list[int]


@dataclass(frozen=True, slots=True)
class Common:
    """The rows that are dealt over all buckets.

    Attributes:
        keys: ascending, ``(rows,)``.
        copies: of each in the set, ``(rows,)``.
        paths: of the files that hold the rows, in the order of the keys.
    """

    keys: Words
    copies: Counts
    paths: tuple[str, ...] = ()

    @classmethod
    def of(cls, reports: Sequence[CommonReport]) -> Common:
        """What the tasks of all buckets, in their order, have found."""
        keys = np.array([key for report in reports for key in report["keys"]], np.uint64)
        copies = np.array([count for report in reports for count in report["copies"]], np.int64)
        return cls(keys, copies, tuple(report["path"] for report in reports if report["keys"]))

    def share(self, bucket: int, buckets: int) -> Counts:
        """Copies of each row that one bucket gets: equally many, one more in some that the key chooses."""
        least, remainder = np.divmod(self.copies, buckets)
        offsets = (np.int64(bucket) - (mixed(self.keys) % np.uint64(buckets)).astype(np.int64)) % buckets
        return least + (offsets < remainder)


@dataclass(frozen=True, slots=True)
class Spreading:
    """A set between its two stages, as tasks get it.

    A key of 64 bits, which the row's bytes and the seed decide, says where a row goes. Writing then takes two stages::

        runs      each task buffers its rows, sorts them by key, joins equal rows into one with a count, writes a run
        buckets   each task reads one range of keys from all runs, and writes its rows in the order of a second hash

    The buckets are the shards. Their number follows from the bytes of the set, so nothing depends on the tasks. Equal
    rows have equal keys and would all lie in one bucket: those that come often are *common*, and are dealt evenly over
    all buckets, by one stage between the two, which sets of less equal rows skip.

    Attributes:
        root: of the set.
        tag: of the transaction, part of every file's name.
        config: sizes and seed.
        tensors: of the rows, all shapes known.
        runs: of all tasks.
        buckets: a power of two: as many as shards of ``shard_bytes`` would be, and up to four where the set is smaller,
            so that tasks share the work.
        least_common: copies from which on a row is common.
        common: the rows that are.
    """

    root: Storage
    tag: str
    config: ShardConfig
    tensors: tuple[TensorSpec, ...]
    runs: tuple[Run, ...]
    buckets: int
    least_common: int
    common: Common | None = None

    @classmethod
    def of(
        cls, root: Storage, tag: str, config: ShardConfig, tensors: Sequence[TensorSpec], runs: Sequence[Run]
    ) -> Spreading:
        """Divide the rows of ``runs``; their order does not matter."""
        size = sum(run.bytes for run in runs)
        least_buckets = max(size / config.shard_bytes, min(4, 8 * size / config.shard_bytes))
        buckets = 1 << max(0, math.ceil(math.log2(max(1.0, least_buckets))))
        # A thousandth of a bucket; and so often that all common rows, once each, are no more than a bucket's.
        least_common = max(2, buckets, sum(run.rows for run in runs) // (1024 * buckets))
        return cls(root, tag, config, tuple(tensors), tuple(runs), buckets, least_common)

    @property
    def may_have_common(self) -> bool:
        """Whether a row can be common, by what is known of the runs."""
        return self.buckets > 1 and sum(run.most for run in self.runs) >= self.least_common

    def find_common(self, bucket: int) -> CommonReport:
        """Find the common rows among the keys of one bucket, and write them to a file.

        Rows that share a key and differ are none.
        """
        counts = [self._read(run, bucket, columns=[]) for run in self.runs]
        keys, inverse = np.unique(np.concatenate([keys for _, keys, _ in counts]), return_inverse=True)
        copies = np.zeros(len(keys), np.int64)
        np.add.at(copies, inverse, np.concatenate([copies for _, _, copies in counts]))
        keys, copies = keys[copies >= self.least_common], copies[copies >= self.least_common]
        report: CommonReport = {"path": "", "keys": [], "copies": []}
        if not keys.size:
            return report
        parts = [_kept(part, np.isin(part[1], keys)) for part in (self._read(run, bucket) for run in self.runs)]
        counted = [part for part in parts if part[1].size]
        rows, every = concatenate([rows for rows, _, _ in counted]), np.concatenate([keys for _, keys, _ in counted])
        order = np.argsort(every, kind="stable")
        rows, every = permuted(rows, order), every[order]
        first = np.flatnonzero(~_equal_neighbours(rows, every))
        if first.size != keys.size:  # rows that differ share a key
            return report
        path = f"shards/common-{bucket:05d}-{self.tag}-{uuid.uuid4().hex[:8]}.arrow"
        _write_run(self.root.child(path), permuted(rows, first), keys, copies, self.tensors)
        return {"path": path, "keys": keys.tolist(), "copies": copies.tolist()}

    def write(self, bucket: int) -> dict[str, Any]:
        """Write the shards of one bucket; what they hold, as JSON-able values."""
        parts = [self._read(run, bucket) for run in self.runs]
        if self.common is not None and self.common.keys.size:
            parts = [_kept(part, ~np.isin(part[1], self.common.keys)) for part in parts]
            exemplars = concatenate([self._read_file(path)[0] for path in self.common.paths])
            share = self.common.share(bucket, self.buckets)
            parts.append(_kept((exemplars, self.common.keys, share), share > 0))
        parts = [part for part in parts if part[1].size]
        if not parts:
            return {"shards": []}
        rows = concatenate([rows for rows, _, _ in parts])
        keys, copies = (np.concatenate([part[number] for part in parts]) for number in (1, 2))
        order = _order(keys, copies, bucket)
        writer = ShardWriter(self.root, bucket, self.tag, self.config)
        try:
            for start in range(0, order.size, _AT_ONCE):
                part = order[start : start + _AT_ONCE]
                writer.add(permuted(rows, part), part.size, self.tensors)
            return {"shards": [shard_to_json(shard) for shard in writer.finish(self.tensors)]}
        except BaseException:
            writer.abort()
            raise

    def _read(self, run: Run, bucket: int, columns: Sequence[str] | None = None) -> Part:
        """The rows of a run whose keys belong to a bucket."""
        low, high = bucket * _SLICES // self.buckets, -(-(bucket + 1) * _SLICES // self.buckets)
        batches = [number for number, piece in enumerate(run.slices) if low <= piece < high]
        part = self._read_file(run.path, batches, columns)
        if self.buckets <= _SLICES:
            return part
        return _kept(part, part[1] >> np.uint64(64 - self.buckets.bit_length() + 1) == np.uint64(bucket))

    def _read_file(self, path: str, batches: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> Part:
        file = self.root.child(path)
        tensors = self.tensors if columns is None else ()
        with storage_errors(file.uri, "read"):
            local = file.local_path()
            source = pa.memory_map(str(local)) if local is not None else pa.PythonFile(file.open_input(), mode="r")
            with source:
                schema = _run_schema(self.tensors)
                field_numbers = None if columns is None else [len(schema) - 2, len(schema) - 1]
                reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=field_numbers))
                numbers = range(reader.num_record_batches) if batches is None else batches
                table = pa.Table.from_batches([reader.get_batch(number) for number in numbers], reader.schema)
                batch = table.combine_chunks().to_batches()
        if not batch:
            return {}, np.empty(0, np.uint64), np.empty(0, np.int64)
        return from_batch(batch[0], tensors), to_numpy(batch[0].column(_KEY)), to_numpy(batch[0].column(_COPIES))


def _kept(part: Part, mask: npt.NDArray[np.bool_]) -> Part:
    rows, keys, copies = part
    if mask.all():
        return part
    indices = np.flatnonzero(mask)
    return permuted(rows, indices), keys[indices], copies[indices]


def _order(keys: Words, copies: Counts, bucket: int) -> npt.NDArray[np.int64]:
    """Which row comes where in a bucket, each as often as it has copies, ``(copies.sum(),)``."""
    ascending = np.argsort(keys, kind="stable")
    rows = np.repeat(ascending, copies[ascending])
    keys = keys[rows]
    begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    number = np.arange(rows.size) - np.repeat(begins, np.diff(begins, append=rows.size))  # of equal rows
    places = mixed(keys + (number.astype(np.uint64) + np.uint64(1)) * _GOLDEN + mixed(np.array([bucket], np.uint64)))
    order: npt.NDArray[np.int64] = rows[np.argsort(places, kind="stable")]
    return order


def spread(sets: Sequence[Spreading], run_stage: Stage) -> list[tuple[ShardInfo, ...]]:
    """Take the rows of each set from its runs to its shards.

    Args:
        sets: at once, since their tasks share the slots.
        run_stage: calls a task with each number below a count, somewhere, and returns what it returned.

    Returns:
        the shards of each set, in their order.
    """
    searched = [number for number, spreading in enumerate(sets) if spreading.may_have_common]
    if searched:
        jobs = [(number, bucket) for number in searched for bucket in range(sets[number].buckets)]
        reports = run_stage(_Jobs(tuple(sets), tuple(jobs), "find_common"), len(jobs))
        sets = [
            replace(
                spreading,
                common=Common.of([report for (n, _), report in zip(jobs, reports, strict=True) if n == number]),
            )
            for number, spreading in enumerate(sets)
        ]
    jobs = [(number, bucket) for number, spreading in enumerate(sets) for bucket in range(spreading.buckets)]
    written = run_stage(_Jobs(tuple(sets), tuple(jobs), "write"), len(jobs)) if jobs else []
    shards: list[list[ShardInfo]] = [[] for _ in sets]
    for (number, _), report in zip(jobs, written, strict=True):
        shards[number].extend(shard_from_json(shard) for shard in report["shards"])
    return [tuple(of_set) for of_set in shards]


@dataclass(frozen=True, slots=True)
class _Jobs:
    """The task of a stage: what a method of some set says of some bucket, by number."""

    sets: tuple[Spreading, ...]
    jobs: tuple[tuple[int, int], ...]
    method: str

    def __call__(self, number: int) -> Any:
        which, bucket = self.jobs[number]
        return getattr(self.sets[which], self.method)(bucket)


def row_keys(rows: Rows, count: int, seed: int) -> Words:
    """A hash of 64 bits of each row's bytes, all tensors together, ``(count,)``; not made to withstand attacks."""
    keys = np.full(count, (seed * int(_GOLDEN) + 1) % 2**64, np.uint64)
    for values in rows.values():
        if isinstance(values, np.ndarray):
            keys = mixed(keys + _hash_of_even(values.reshape(count, -1)))
        else:
            keys = mixed(keys + _hash_of_lists(values))
    return keys


def _hash_of_even(matrix: np.ndarray[Any, Any]) -> Words:
    """The sum of each row's words, each mixed with its place."""
    data = np.ascontiguousarray(matrix).view(np.uint8).reshape(len(matrix), -1)
    pad = -data.shape[1] % 8
    if pad:
        data = np.concatenate([data, np.zeros((len(data), pad), np.uint8)], axis=1)
    words = data.view(np.uint64)
    places = mixed(np.arange(1, words.shape[1] + 1, dtype=np.uint64) * _GOLDEN)
    sums = np.zeros(len(words), np.uint64)
    for start in range(0, len(words), 4096):  # a part that fits into the cache
        part = words[start : start + 4096]
        sums[start : start + 4096] = mixed(part + places).sum(axis=1, dtype=np.uint64)
    return sums


def _hash_of_lists(array: pa.Array) -> Words:
    """The sum of each list's elements, each mixed with its place in the list, and of the length."""
    array = _of_numbers(array)
    if isinstance(array, pa.ListArray):
        offsets, values = to_numpy(array.offsets).astype(np.int64), to_numpy(array.values)
    else:
        _, bounds, data = array.buffers()
        offsets = np.frombuffer(bounds, np.int64)[array.offset : array.offset + len(array) + 1]
        values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    lengths = np.diff(offsets)
    elements = values[offsets[0] : offsets[-1]]
    words = elements.view(f"u{elements.dtype.itemsize}").astype(np.uint64)
    of_place = mixed(np.arange(int(lengths.max(initial=0)), dtype=np.uint64) * _GOLDEN)
    if words.size and (lengths == lengths[0]).all():
        rows, sums = words.reshape(len(lengths), -1), np.empty(len(lengths), np.uint64)
        step = max(1, _AT_ONCE // rows.shape[1])  # rows that fit into the cache
        for start in range(0, len(rows), step):
            sums[start : start + step] = mixed(rows[start : start + step] + of_place).sum(axis=1, dtype=np.uint64)
    else:
        positions = np.arange(len(words), dtype=np.int64) - np.repeat(offsets[:-1] - offsets[0], lengths)
        totals = np.zeros(len(words) + 1, np.uint64)
        np.cumsum(mixed(words + of_place[positions]), out=totals[1:])
        ends = offsets - offsets[0]
        sums = totals[ends[1:]] - totals[ends[:-1]]
    sums += mixed(lengths.astype(np.uint64))
    return sums


def _equal_neighbours(rows: Rows, keys: Words) -> npt.NDArray[np.bool_]:
    """Which rows, sorted by key, are the row before them, to the bit; none where two rows merely share a key."""
    same = np.concatenate([[False], keys[1:] == keys[:-1]])
    second = np.flatnonzero(same)
    if second.size:
        left, right = permuted(rows, second - 1), permuted(rows, second)
        for name, values in left.items():
            if isinstance(values, np.ndarray):
                equal = values.tobytes() == right[name].tobytes()
            else:
                equal = _as_integers(values).equals(_as_integers(right[name]))
            if not equal:
                same[:] = False
    return same


def _of_numbers(array: pa.Array) -> pa.Array:
    """Lists of arrays of one length as lists of their numbers; other lists as they are."""
    if not isinstance(array, pa.ListArray) or not pa.types.is_fixed_size_list(array.type.value_type):
        return array
    offsets = to_numpy(array.offsets) * np.int32(array.type.value_type.list_size)
    return pa.ListArray.from_arrays(from_numpy(offsets), array.values.flatten())


def _as_integers(array: pa.Array) -> pa.Array:
    """Lists of floats as lists of whole numbers: NaN equals itself then, and zero is not minus zero."""
    array = _of_numbers(array)
    if isinstance(array, pa.ListArray) and pa.types.is_floating(array.type.value_type):
        unsigned = getattr(pa, f"uint{array.type.value_type.bit_width}")()
        return pa.ListArray.from_arrays(array.offsets, array.values.view(unsigned))
    return array


class RunWriter:
    """Writes the tensors of one partition as runs.

    Args:
        root: of the set.
        partition: its number.
        tag: of the transaction; together with a number drawn here it is part of every file's name.
        config: sizes and seed.

    Attributes:
        runs: written so far.
    """

    def __init__(self, root: Storage, partition: int, tag: str, config: ShardConfig) -> None:
        self._root, self._partition, self._config = root, partition, config
        self._tag = f"{tag}-{uuid.uuid4().hex[:8]}"
        self._pending: list[Rows] = []
        self._bytes = 0
        self.runs: list[Run] = []

    def add(self, rows: Rows, count: int, tensors: Sequence[TensorSpec]) -> None:
        """Take in ``count`` rows."""
        self._pending.append(rows)
        self._bytes += int(row_ends(rows, count)[-1])
        if self._bytes >= min(_RUN_BYTES, self._config.shard_bytes):
            self._write(tensors)

    def finish(self, tensors: Sequence[TensorSpec]) -> list[Run]:
        """Write the rows that are left; all runs of the partition."""
        if self._pending:
            self._write(tensors)
        return self.runs

    def _write(self, tensors: Sequence[TensorSpec]) -> None:
        rows, size = concatenate(self._pending), self._bytes
        self._pending, self._bytes = [], 0
        count = len(next(iter(rows.values())))
        keys = row_keys(rows, count, self._config.seed)
        order = np.argsort(keys, kind="stable")
        rows, keys = permuted(rows, order), keys[order]
        first = np.flatnonzero(~_equal_neighbours(rows, keys))
        copies = np.diff(first, append=count)
        if first.size < count:
            rows, keys = permuted(rows, first), keys[first]
        path = f"shards/run-{self._partition:05d}-{len(self.runs):04d}-{self._tag}.arrow"
        slices = _write_run(self._root.child(path), rows, keys, copies, tensors)
        self.runs.append(Run(path, count, size, int(copies.max()), slices))

    def abort(self) -> None:
        """Remove what was written."""
        for run in self.runs:
            with suppress(StorageError):  # a vacuum will find it
                self._root.child(run.path).delete()
        self._pending, self.runs = [], []


def _write_run(
    file: Storage, rows: Rows, keys: Words, copies: Counts, tensors: Sequence[TensorSpec]
) -> tuple[int, ...]:
    """Write a file of rows that are sorted by key; the 64th of the range of keys that each record batch holds."""
    batch = to_batch(rows, tensors)
    arrays = [*batch.columns, from_numpy(keys), from_numpy(copies)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=_run_schema(tensors))
    slices = []
    edges = np.searchsorted(keys, np.arange(_SLICES, dtype=np.uint64) << np.uint64(58)).tolist()
    with (
        storage_errors(file.uri, "write"),
        file.open_output(durable=False) as stream,
        pa.ipc.new_file(pa.PythonFile(stream, mode="w"), batch.schema) as writer,
    ):
        for number, (start, stop) in enumerate(zip(edges, [*edges[1:], len(keys)], strict=True)):
            if stop > start:
                writer.write_batch(batch.slice(start, stop - start))
                slices.append(number)
    return tuple(slices)


def _run_schema(tensors: Sequence[TensorSpec]) -> pa.Schema:
    fields = [pa.field(_KEY, pa.uint64(), nullable=False), pa.field(_COPIES, pa.int64(), nullable=False)]
    return pa.schema([*arrow_schema(tensors), *fields])
