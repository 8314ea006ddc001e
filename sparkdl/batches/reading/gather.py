"""Rows to tensors: one indexed copy per tensor, without a loop over rows and without a copy before it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sparkdl.batches.memory.address_space import AddressSpace
from sparkdl.batches.memory.blocks import Blocks, is_ragged
from sparkdl.batches.order.permutations import Empty
from sparkdl.columns.cast import cast
from sparkdl.columns.spec import TensorSpec
from sparkdl.config import LoaderConfig
from sparkdl.errors import ConfigError, DataError, SchemaError

Ints = npt.NDArray[np.int64]
Tensors = dict[str, torch.Tensor]
Places = tuple[Ints, ...]
"""The places of rows: their element in the address space; of ragged rows their first element and their length."""

Allocate = Callable[[int], "torch.Tensor"]
"""A function that returns a uint8 tensor of so many bytes, aligned for any dtype."""

Decode = Callable[[memoryview], Any]
"""A function from the bytes of one row to an array or tensor, of the same shape and dtype for every row."""

_SKEW = 4
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}  # torch indexes no others


def valid_name(name: str) -> str:
    """The name of the tensor that is True where a padded tensor holds data."""
    return f"{name}__valid"


class Views:
    """The address space as torch tensors of every dtype and row length.

    A row of ``n`` elements may start at any element of the address space. So that is seen as a matrix whose row ``i``
    is the ``n`` elements from element ``i`` on (stride 1: its rows overlap), and ``index_select`` on that matrix
    gathers rows of any blocks and files at the speed of the memory, in parallel threads, without the interpreter's
    lock.
    """

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # read-only memory: only ever an index_select's source
            self._flat = torch.from_numpy(space.bytes)
        self._made: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def rows(self, dtype: torch.dtype, width: int) -> torch.Tensor:
        """``(elements, width)``, row ``i`` starting at element ``i``; ``(elements,)`` for width 1."""
        view = self._made.get((dtype, width))
        if view is None:
            flat = self._flat.view(dtype)
            view = flat if width == 1 else flat.as_strided((max(0, flat.numel() - width + 1), width), (1, 1))
            if len(self._made) < 1024:
                self._made[dtype, width] = view
        return view

    def array(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """The address space as a flat numpy array."""
        return self._space.bytes.view(dtype)


class Column(Protocol):
    """One tensor of the set, gathered into one or two tensors of a batch."""

    spec: TensorSpec

    def locate(self, block: Ints, row: Ints, empty: Empty) -> Places:
        """The places of the rows ``(block[i], row[i])``, as arrays with one entry each; ``empty`` may supply them."""

    def gather(self, places: Places, sizes: Sequence[int], allocate: Allocate) -> list[Tensors]:
        """Gather the rows at some places, in this order, as one dict of tensors for each step of ``sizes`` rows."""


def _dtypes(spec: TensorSpec) -> tuple[torch.dtype, torch.dtype]:
    """What is gathered from the file, and what the tensor is; both have elements of the same bytes."""
    if spec.dtype == "bool":
        return torch.uint8, torch.bool
    dtype: torch.dtype = getattr(torch, "uint8" if spec.dtype == "binary" else spec.dtype)
    return _SIGNED.get(dtype, dtype), dtype


def _gather(view: torch.Tensor, index: Ints, width: int, allocate: Allocate) -> torch.Tensor:
    shape = (index.size, width) if view.dim() == 2 else (index.size,)
    out = allocate(index.size * width * view.element_size()).view(view.dtype).view(shape)
    return torch.index_select(view, 0, torch.from_numpy(index), out=out)


class Fixed:
    """A tensor whose rows all have one shape.

    Args:
        spec: of the tensor.
        blocks: of the set.
        views: of its address space.
    """

    def __init__(self, spec: TensorSpec, blocks: Blocks, views: Views) -> None:
        self.spec = spec
        self._base = blocks.base[spec.name]
        self._stored, self._dtype = _dtypes(spec)
        self._width = math.prod(spec.shape)
        self._view = views.rows(self._stored, self._width) if self._width else None

    def locate(self, block: Ints, row: Ints, empty: Empty) -> Places:
        """The element of the address space where each row starts."""
        index = np.multiply(row, self._width, out=empty(row.size))
        index += np.take(self._base, block, out=empty(row.size), mode="clip")
        return (index,)

    def gather(self, places: Places, sizes: Sequence[int], allocate: Allocate) -> list[Tensors]:
        """Gather ``(rows, *shape)``."""
        (index,) = places
        if self._view is None:
            out = torch.empty((index.size, *self.spec.shape), dtype=self._dtype)
        else:
            out = _gather(self._view, index, self._width, allocate).view(self._dtype)
            if len(self.spec.shape) != out.dim() - 1:
                out = out.view(index.size, *self.spec.shape)
        return [{self.spec.name: part} for part in torch.split(out, list(sizes))]


class RaggedColumn:
    """A tensor whose rows differ in length, padded or as a jagged nested tensor.

    Rows are gathered like even ones, with the longest row's length as ``n``; what lies behind a shorter row is then
    overwritten by the padding. Where that would move four times the bytes, elements are gathered one by one instead.
    """

    def __init__(self, spec: TensorSpec, blocks: Blocks, views: Views, config: LoaderConfig) -> None:
        self.spec = spec
        self._blocks, self._views, self._config = blocks, views, config
        self._stored, self._dtype = _dtypes(spec)
        self._width = math.prod(spec.shape)

    def locate(self, block: Ints, row: Ints, empty: Empty) -> Places:
        """The start of each row in the address space, in elements of the dtype, and how many of ``shape`` it has."""
        name = self.spec.name
        starts = np.zeros(block.size, np.int64)
        if not block.size:
            return starts, starts
        offsets = self._views.array(self._blocks.offset_dtype[name])
        positions = self._blocks.offsets[name].take(block) + row
        starts = offsets.take(positions).astype(np.int64)
        lengths = offsets.take(positions + 1) - starts
        starts *= self._width
        starts += self._blocks.base[name].take(block)
        if self._config.max_length is not None and self.spec.dtype != "binary":
            lengths = np.minimum(lengths, self._config.max_length)
        return starts, lengths

    def gather(self, places: Places, sizes: Sequence[int], allocate: Allocate) -> list[Tensors]:
        """Gather ``(rows, longest, *shape)`` with its ``(rows, longest)`` mask, or one nested tensor."""
        starts, lengths = places
        return [self._step(starts[rows], lengths[rows], allocate) for rows in _slices(sizes)]

    def _step(self, starts: Ints, lengths: Ints, allocate: Allocate) -> Tensors:
        count = starts.size
        if self._config.ragged == "jagged":
            values = self._elements(starts, lengths, allocate).view(self._dtype).view(-1, *self.spec.shape)
            edges = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
            return {self.spec.name: torch.nested.nested_tensor_from_jagged(values, edges)}
        longest = int(lengths.max(initial=0))
        valid = torch.arange(longest) < torch.from_numpy(lengths)[:, None]
        width, element = longest * self._width, self._stored.itemsize
        total = int(lengths.sum()) * self._width
        even = total == count * width
        if width == 0:
            padded = torch.empty((count, width), dtype=self._stored)
        elif count * width <= _SKEW * total and width * element < AddressSpace.GUARD:
            padded = _gather(self._views.rows(self._stored, width), starts, width, allocate).view(count, width)
            if not even:
                padded.view(count, longest, -1).masked_fill_(~valid[:, :, None], self._config.pad_value)
        else:
            padded = allocate(count * width * element).view(self._stored).view(count, width)
            padded.fill_(self._config.pad_value)
            where = valid[:, :, None].expand(-1, -1, self._width).reshape(count, width)
            padded[where] = self._elements(starts, lengths, allocate)
        padded = padded.view(self._dtype).view(count, longest, *self.spec.shape)
        return {self.spec.name: padded, valid_name(self.spec.name): valid}

    def _elements(self, starts: Ints, lengths: Ints, allocate: Allocate) -> torch.Tensor:
        """The elements of all rows behind each other, ``(elements,)``."""
        sizes = lengths * self._width
        sizes_before = np.cumsum(sizes) - sizes
        index = np.repeat(starts - sizes_before, sizes)
        index += np.arange(index.size)
        return _gather(self._views.rows(self._stored, 1), index, 1, allocate)


class Decoded:
    """A binary tensor turned into arrays by a function of the user's, in threads."""

    def __init__(self, inner: RaggedColumn, views: Views, decode: Decode, executor: Executor, threads: int) -> None:
        self.spec = inner.spec
        self._inner, self._views, self._decode = inner, views, decode
        self._executor, self._threads = executor, threads
        self._like: torch.Tensor | None = None

    def locate(self, block: Ints, row: Ints, empty: Empty) -> Places:
        """The start of each row's bytes, and how many there are."""
        return self._inner.locate(block, row, empty)

    def gather(self, places: Places, sizes: Sequence[int], allocate: Allocate) -> list[Tensors]:
        """Gather ``(rows, *shape of what the function returns)``."""
        starts, lengths = places
        flat = self._views.array(np.dtype(np.uint8)).data
        cuts = list(zip(starts.tolist(), lengths.tolist(), strict=True))
        share = -(-len(cuts) // (2 * self._threads)) or 1

        def decode(part: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
            return [torch.as_tensor(self._decode(flat[at : at + size])) for at, size in part]

        parts = [self._executor.submit(decode, cuts[at : at + share]) for at in range(0, len(cuts), share)]
        rows = [value for part in parts for value in part.result()]
        return [{self.spec.name: self._stack(rows[batch_slice], allocate)} for batch_slice in _slices(sizes)]

    def _stack(self, rows: Sequence[torch.Tensor], allocate: Allocate) -> torch.Tensor:
        for value in rows:
            if self._like is None:
                self._like = value
            like = self._like
            if value.shape != like.shape or value.dtype != like.dtype:
                raise DataError(
                    f"the decode hook of {self.spec.name!r} returned {tuple(like.shape)} {like.dtype} for one row and "
                    f"{tuple(value.shape)} {value.dtype} for another: make it return one shape and dtype"
                )
        if not rows:
            return torch.empty(0) if self._like is None else self._like.new_empty((0, *self._like.shape))
        out = allocate(len(rows) * rows[0].numel() * rows[0].element_size()).view(rows[0].dtype)
        return torch.stack(list(rows), out=out.view(len(rows), *rows[0].shape))


def _slices(sizes: Sequence[int]) -> list[slice]:
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def make_columns(
    tensors: Sequence[TensorSpec],
    blocks: Blocks,
    config: LoaderConfig,
    decode: Mapping[str, Decode],
    executor: Executor | None,
    threads: int,
) -> list[Column]:
    """Choose how each tensor is gathered.

    Raises:
        ConfigError: a decode hook names a tensor that is not read, or a tensor cannot hold the padding.
        SchemaError: a decode hook names a tensor that holds no byte strings.
    """
    views = Views(blocks.space)
    names = [spec.name for spec in tensors]
    columns: list[Column] = []
    for name in decode:
        if name not in names:
            raise ConfigError(f"decode names {name!r}, the tensors read are {', '.join(names)}: correct the name")
    for spec in tensors:
        if not is_ragged(spec):
            if spec.name in decode:
                raise SchemaError(f"decode names {spec.name!r}, which holds {spec.dtype}, not bytes: leave it out")
            columns.append(Fixed(spec, blocks, views))
            continue
        ragged = RaggedColumn(spec, blocks, views, config)
        if config.ragged == "padded" and spec.name not in decode:
            _check_padding(spec, config.pad_value)
        if spec.name in decode and executor is not None:
            columns.append(Decoded(ragged, views, decode[spec.name], executor, threads))
        else:
            columns.append(ragged)
    return columns


def _check_padding(spec: TensorSpec, value: float) -> None:
    """Refuse what a tensor cannot hold: torch cuts a fraction off, and makes 255 of -1 in a byte."""
    try:
        cast(np.array([value], np.float64), spec.dtype, spec.name)
    except DataError as cause:
        raise ConfigError(
            f"pad_value={value} cannot stand in tensor {spec.name!r} of {spec.dtype}, whose rows differ in length: "
            "choose another, or leave the tensor out"
        ) from cause
