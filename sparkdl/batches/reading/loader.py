"""The loader: shards to batches, at memory speed, in an order that never depends on the world size."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from sparkdl.batches.memory.blocks import Blocks
from sparkdl.batches.memory.buffer_pool import BufferRing
from sparkdl.batches.memory.cached import open_blocks
from sparkdl.batches.order.patterns import Patterns
from sparkdl.batches.order.plan import Order, Steps
from sparkdl.batches.reading.batch import Batch
from sparkdl.batches.reading.explain import Explanation, explain
from sparkdl.batches.reading.gather import Column, Decode, make_columns, valid_name
from sparkdl.batches.reading.geometry import Geometry, cores, gather_threads
from sparkdl.batches.reading.reader import Reader
from sparkdl.columns.spec import TensorSpec
from sparkdl.config import LoaderConfig
from sparkdl.errors import ConfigError, IntegrityError
from sparkdl.observe import logger
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import Storage, xxh3_hex
from sparkdl.world import World

_STATE_VERSION = 2


class ShardedDataset:
    """A committed shard set, ready to be read.

    Args:
        uri: of the set: a path, ``s3://...`` and the like, or a ``Storage`` with credentials of its own.
        tensors: names of the tensors to read; all by default.
        config: how to read.

    Attributes:
        manifest: the index of the set.
        tensors: the tensors that are read, in the order of the set.
        config: how they are read.

    Raises:
        StorageError: there is no committed set at ``uri``.
        SchemaError: the set has no tensor of such a name.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Storage,
        *,
        tensors: Sequence[str] | None = None,
        config: LoaderConfig | None = None,
    ) -> None:
        self._root = Storage.of(uri)
        self.config = config or LoaderConfig()
        self.manifest = Manifest.load(self._root)
        chosen = None if tensors is None else {self.manifest.tensor(name).name for name in tensors}
        self.tensors: tuple[TensorSpec, ...] = tuple(
            spec for spec in self.manifest.tensors if chosen is None or spec.name in chosen
        )
        self._check_names()

    def _check_names(self) -> None:
        tensor_names = {spec.name for spec in self.tensors}
        for spec in self.tensors:
            if spec.ragged and self.config.ragged == "padded" and valid_name(spec.name) in tensor_names:
                raise ConfigError(
                    f"{valid_name(spec.name)!r} is a tensor of the set and the mask of padded {spec.name!r}: "
                    "read with ragged='jagged', or leave one out of tensors"
                )

    def __len__(self) -> int:
        """Rows of the set."""
        return self.manifest.rows

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("blocks", "geometry")}

    @cached_property
    def geometry(self) -> Geometry:
        """Sizes and counts that the order is made from."""
        return Geometry.of(self.manifest, self.tensors, self.config)

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks in memory, shared by all loaders of this dataset."""
        return open_blocks(self.manifest, self._root, self.tensors, self.config)

    def loader(
        self,
        *,
        world: World | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: str = "exact",
        decode: Mapping[str, Decode] | None = None,
    ) -> ShardLoader:
        """Make the batches of one rank.

        Args:
            world: which rank this is; by default what a launcher's environment says, else the only one.
            batch_size: rows per rank and step.
            global_batch_size: rows per step over all ranks, instead of ``batch_size``.
            shuffle: False reads in file order.
            seed: of the shuffle.
            tail: ``"exact"``, ``"drop"`` or ``"pad"``: what becomes of rows that do not fill the last step; see
                ``plan.Steps``.
            decode: by name of a binary tensor, a function from the bytes of a row to an array; run in threads.

        Raises:
            ConfigError: a parameter is wrong.
            DataError: there would be no step.
        """
        world = World.from_env() if world is None else world
        if (batch_size is None) == (global_batch_size is None):
            raise ConfigError(
                f"batch_size={batch_size} and global_batch_size={global_batch_size}: give one of them, rows per "
                "rank or rows of all ranks"
            )
        options = _Options(
            world=world,
            per_rank=batch_size,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            decode=dict(decode or {}),
        )
        return ShardLoader(self, options, global_batch_size or (batch_size or 0) * world.size)

    def explain(
        self, *, world_size: int = 1, batch_size: int, tail: str = "exact", shuffle: bool = True, seed: int = 0
    ) -> Explanation:
        """Print, and return, what an epoch will be before anything runs: steps, rows, bytes, memory, shuffle quality.

        Args:
            world_size: number of ranks.
            batch_size: rows per rank and step.
            tail: as in ``loader``.
            shuffle: as in ``loader``.
            seed: as in ``loader``.
        """
        order = self.geometry.order(seed, 0, shuffle)
        steps = Steps(rows=self.manifest.rows, global_batch=batch_size * world_size, world_size=world_size, tail=tail)
        threads = gather_threads(self.config, 1)
        explanation = explain(self.manifest, self.geometry, order, steps, threads)
        print(explanation)
        return explanation


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """What a loader was asked for; ``per_rank`` is None where the global batch was given."""

    world: World
    per_rank: int | None
    shuffle: bool
    seed: int
    tail: str
    decode: dict[str, Decode] = field(default_factory=dict)


class ShardLoader:
    """The batches of one rank: iterate it once an epoch.

    ``for batch in loader`` yields one epoch; the next ``for`` yields the next one, in another order. Breaking off and
    iterating again starts the same epoch over; ``set_epoch`` chooses it. After ``load_state_dict`` the first ``for``
    continues where the state was taken. Files that changed while they were read are an ``IntegrityError`` at the end of
    the epoch; of one that was broken off, in ``end_epoch`` or the next ``for``.

    Tensors are views of buffers that are reused, but never while any tensor of them is alive: a batch may be kept, it
    then keeps its buffer.

    What is held fixed across world sizes is the *global* batch: ``batch_size`` counts rows per rank and step, as
    Horovod's does, so the global batch is ``batch_size * world.size``; give ``global_batch_size`` instead to keep step
    ``k`` the same rows on any number of ranks. A restored state keeps its global batch on any world size.

    Attributes:
        dataset: what is read.
        world: which rank this is.
        global_batch_rows: rows of a step over all ranks.
        epoch: the epoch that the next ``for`` yields.
    """

    def __init__(self, dataset: ShardedDataset, options: _Options, global_batch_rows: int) -> None:
        self.dataset = dataset
        self.world = options.world
        self.global_batch_rows = global_batch_rows
        self.epoch = 0
        self._options = options
        self._steps = self._cut(global_batch_rows)
        self._patterns: Patterns | None = None
        self._resume_step = 0
        self._position = (0, 0)
        self._damage: IntegrityError | None = None
        self._ring = BufferRing(0, dataset.config.pin_memory)  # outlives the epochs: fresh memory is slow
        self._numbers = BufferRing(0)
        dataset.geometry.order(options.seed, 0, options.shuffle)  # refuses wrong numbers here, not in the first step
        self._columns(None)

    def _cut(self, global_batch_rows: int) -> Steps:
        return Steps(
            rows=self.dataset.manifest.rows,
            global_batch=global_batch_rows,
            world_size=self.world.size,
            tail=self._options.tail,
        )

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return self._steps.count

    @property
    def batch_size(self) -> int:
        """The most rows that this rank gets in a step."""
        return -(-self.global_batch_rows // self.world.size)

    def bounds(self, name: str) -> tuple[float, float] | None:
        """Return the least and the greatest value of the tensor ``name`` over the set, as its writer counted them.

        None where that is not known: rows are padded, nulls were filled, values are bytes, or there is no such tensor.
        """
        specs = [
            spec for spec in self.dataset.tensors if spec.name == name and not spec.ragged and spec.dtype != "binary"
        ]
        statistics = [self.dataset.manifest.statistics.get(column) for spec in specs for column in spec.columns]
        extremes = [(column.min, column.max) for column in statistics if column and not column.null_count]
        ends = [float(end) for pair in extremes for end in pair if end is not None]
        return (min(ends), max(ends)) if ends and len(ends) == 2 * len(statistics) else None

    def set_epoch(self, epoch: int) -> None:
        """Go to the first step of ``epoch``, or, if that is the epoch a state was just loaded for, stay at its step."""
        if epoch < 0:
            raise ConfigError(f"epoch={epoch} is below 0: epochs count from 0")
        if epoch != self.epoch:
            self._resume_step = 0
        self.epoch = epoch
        self._position = (epoch, self._resume_step)

    def state_dict(self) -> dict[str, Any]:
        """The position as a few JSON-able values: batches that were handed out, not those gathered ahead."""
        epoch, step = self._position
        return {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "step": step,
            "seed": self._options.seed,
            "global_batch": self.global_batch_rows,
            "order": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind the last batch that the state counts, at this loader's world size.

        The state's global batch is kept: with another number of ranks, each gets more or fewer rows than
        ``batch_size``.

        Raises:
            ConfigError: the state is of another order of rows, or another ``global_batch_size`` was asked for.
        """
        if state.get("version") != _STATE_VERSION:
            raise ConfigError(f"a loader state of version {state.get('version')} is not {_STATE_VERSION}: start anew")
        for name, own_value, remedy in (
            ("order", self._fingerprint, "read the same shard set with the same shuffle, tail, pool_bytes and lanes"),
            ("seed", self._options.seed, "make the loader with the state's seed"),
        ):
            if state[name] != own_value:
                raise ConfigError(f"the loader state has {name} {state[name]}, this loader {own_value}: {remedy}")
        rows = int(state["global_batch"])
        if rows != self.global_batch_rows:
            if self._options.per_rank is None:
                raise ConfigError(
                    f"the loader state has a global batch of {rows} rows, this loader {self.global_batch_rows}: ask "
                    f"for global_batch_size={rows}"
                )
            logger.info(
                "keeping the restored global batch of %d rows: %d per rank instead of batch_size=%d",
                rows,
                -(-rows // self.world.size),
                self._options.per_rank,
            )
        self._steps, self._patterns = self._cut(rows), None
        self.global_batch_rows = rows
        self.epoch, step = int(state["epoch"]), int(state["step"])
        if step >= self._steps.count:
            self.epoch, step = self.epoch + 1, 0
        self._resume_step = step
        self._position = (self.epoch, step)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the epoch, or what a loaded state left of it."""
        self.end_epoch()
        step, self._resume_step = self._resume_step, 0
        self._position = (self.epoch, step)
        return self._batches(self.epoch, step)

    def end_epoch(self) -> None:
        """Say what was found when the last epoch was broken off, for one who iterates no further.

        Raises:
            IntegrityError: a block had changed since it was checked, so batches of that epoch may hold damage.
        """
        damage, self._damage = self._damage, None
        if damage is not None:
            raise damage

    def _batches(self, epoch: int, step: int) -> Iterator[Batch]:
        blocks = self.dataset.blocks
        blocks.begin_epoch()
        executor = None
        threads = self.dataset.config.decode_threads or cores(self.world.local_size)
        if self._options.decode:
            executor = ThreadPoolExecutor(threads, thread_name_prefix="sparkdl-decode")
        reader = self._reader(epoch, step, self._columns(executor, threads))
        count, full_steps = self._steps.count, self._steps.rows // self.global_batch_rows
        rows, total = self._extent(step)
        try:
            for number, tensors in enumerate(reader, start=step):
                if number >= full_steps:
                    rows, total = self._extent(number)
                weight = rows * self.world.size / total
                batch = Batch(tensors, step=number, epoch=epoch, rows=rows, global_rows=total, weight=weight)
                del tensors
                if number + 1 == count:
                    self._position = (epoch + 1, 0)
                    self.epoch = epoch + 1
                else:
                    self._position = (epoch, number + 1)
                yield batch
                del batch
            reader.close()
            blocks.end_epoch()
        except GeneratorExit:  # broken off: Python drops what is raised here
            reader.close()
            try:
                blocks.end_epoch()
            except IntegrityError as damage:
                self._damage = damage.with_traceback(None)
                logger.error("%s; batches of epoch %d may hold it", damage, epoch)
            raise
        finally:
            reader.close()
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)
            blocks.rest()

    def _extent(self, step: int) -> tuple[int, int]:
        """Rows of a step on this rank, and on all."""
        low, high = self._steps.share(step, self.world.rank)
        return high - low, self._steps.global_rows(step)

    def _columns(self, executor: ThreadPoolExecutor | None, threads: int = 1) -> list[Column]:
        dataset = self.dataset
        return make_columns(dataset.tensors, dataset.blocks, dataset.config, self._options.decode, executor, threads)

    def _reader(self, epoch: int, step: int, columns: list[Column]) -> Reader:
        geometry, config = self.dataset.geometry, self.dataset.config
        threads = gather_threads(config, self.world.local_size)
        pipeline = geometry.pipeline(self._steps, threads)
        order: Order = geometry.order(self._options.seed, epoch, self._options.shuffle)
        if self._patterns is None:
            self._patterns = Patterns(self._steps, order.lanes, self.world.rank, 4 * pipeline.index_batch_rows)
        self._ring.keep_bytes = 2 * pipeline.buffer_bytes + (1 << 20)  # the sizes of buffers are powers of two
        self._numbers.keep_bytes = pipeline.number_bytes
        return Reader(
            self.dataset.blocks,
            columns,
            order,
            self._patterns,
            first_step=step,
            pipeline=pipeline,
            ring=self._ring,
            numbers=self._numbers,
        )

    @cached_property
    def _fingerprint(self) -> str:
        """The hash of everything but seed, epoch and global batch that the order depends on."""
        geometry, options = self.dataset.geometry, self._options
        facts = (geometry.lanes, geometry.window, options.shuffle, options.tail, self.dataset.manifest.content_hash)
        return xxh3_hex(np.array(geometry.block_rows).tobytes() + repr(facts).encode())[:8]
