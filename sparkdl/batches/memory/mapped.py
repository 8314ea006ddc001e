"""Uncompressed Arrow files of this machine, mapped where they lie."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from sparkdl.batches.memory.address_space import AddressSpace, pages
from sparkdl.batches.memory.blocks import Blocks
from sparkdl.columns.spec import TensorSpec
from sparkdl.config import LoaderConfig
from sparkdl.errors import IntegrityError, StorageError
from sparkdl.shards.manifest import Manifest, ShardInfo
from sparkdl.storage import Storage, xxh3_hex


class _FileState(NamedTuple):
    """What tells that a file was written to, or replaced, since it was looked at."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, facts: os.stat_result) -> _FileState:
        return cls(facts.st_ino, facts.st_size, facts.st_mtime_ns)


class MappedBlocks(Blocks):
    """The blocks of files of this machine.

    They cost no copy, and the ranks of a host share them.

    A file is looked at when an epoch begins and when it ends: one that was written to or replaced since has its blocks
    checked again. Damage that leaves a file's times alone, as that of a failing disk does, is found by
    ``verify="epoch"`` alone.
    """

    def __init__(self, manifest: Manifest, tensors: Sequence[TensorSpec], config: LoaderConfig, root: Storage) -> None:
        self._starts: list[int] = []
        size = 0
        for shard in manifest.shards:
            self._starts.append(size)
            size += pages(shard.bytes)
        super().__init__(manifest, tensors, config, AddressSpace(max(1, size)))
        self._root = root
        self._shard_of = [number for number, shard in enumerate(manifest.shards) for _ in shard.blocks]
        self._mapped: dict[int, _FileState] = {}
        self._forgotten: set[int] = set()

    def _arrive(self, block: int) -> None:
        pass  # the first touch brings it

    def _leave(self, block: int) -> bool:
        info, mapping = self._where[block][1], self._mapped.get(self._shard_of[block])
        if mapping is not None and info.offset + info.bytes <= mapping.size:
            self.space.forget(*self._place(block))
            self._forgotten.add(block)
        return True

    def _present(self, block: int) -> bool:
        if block in self._forgotten:
            self._forgotten.discard(block)
            self.space.populate(*self._place(block))
        return True

    def _place(self, block: int) -> tuple[int, int]:
        """The start of a block in the address space, and its bytes."""
        info = self._where[block][1]
        return self._starts[self._shard_of[block]] + info.offset, info.bytes

    def _map(self, number: int) -> int:
        """Map a shard file once; returns its size."""
        with self._lock:
            if number not in self._mapped:
                shard = self.manifest.shards[number]
                file = self._root.child(shard.path)
                try:
                    with file.open_input() as stream:
                        facts = os.fstat(stream.fileno())
                        if facts.st_size:
                            self.space.map(stream.fileno(), min(facts.st_size, shard.bytes), self._starts[number])
                except StorageError as cause:
                    if not isinstance(cause, IntegrityError) and not file.exists():
                        raise IntegrityError(
                            f"the shard {file.uri} is gone: restore it or write the set again"
                        ) from cause
                    raise
                self._mapped[number] = _FileState.of(facts)
            return self._mapped[number].size

    def _load(self, block: int) -> None:
        self._map(self._shard_of[block])
        self._forgotten.discard(block)
        self._verify(block)
        self._locate_tensors(block, *self._place(block))

    def _verify(self, block: int) -> None:
        shard, info = self._where[block]
        size = self._mapped[self._shard_of[block]].size
        if size < info.offset + info.bytes:  # touching pages behind the end of a file would kill the process
            raise IntegrityError(
                f"{self._uri(shard)} has {size} bytes, its manifest says {shard.bytes}: it was cut short, "
                "restore it or write the set again"
            )
        start, count = self._place(block)
        self.space.populate(start, count)
        actual_hash = xxh3_hex(self.space.bytes[start : start + count])
        if block in self._forgotten:  # nobody reads it now
            self.space.forget(start, count)
        if actual_hash != info.hash:
            raise self._mismatch(shard, info, actual_hash)

    def _suspects(self) -> list[int]:
        changed = set()
        for number, mapping in self._mapped.items():
            path = self._root.child(self.manifest.shards[number].path).local_path()
            assert path is not None
            try:
                file_state = _FileState.of(path.stat())
            except OSError:  # removed, or out of reach: what is mapped stays as it was
                continue
            if file_state != mapping:
                changed.add(number)
        for number in changed:
            del self._mapped[number]
            self._map(number)
        return [block for block, number in enumerate(self._shard_of) if number in changed]

    def _uri(self, shard: ShardInfo) -> str:
        return self._root.child(shard.path).uri
