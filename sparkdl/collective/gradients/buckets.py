"""Flat buckets of gradients that travel together, in the order in which a backward pass fills them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGN_BYTES = 64
SMALLEST_BUCKET_PER_RANK = 2**19
LARGEST_BUCKET = 25 * 2**20


def bucket_bytes(total_bytes: int, world_size: int) -> int:
    """Bytes of gradients in one message, by the shape of the curve that ``tests/bench/bench_bandwidth.py`` measures.

    With one bucket nothing overlaps with the backward pass (an iteration took 1.3-1.9 times the best one's), so that a
    quarter of all gradients is the most. A message costs about 0.2 ms whatever its size (1.4-2 times the best at one
    gradient a message), so that one carries at least half a MiB for every rank: a ring passes it on in parts of a
    ``world_size``-th. For 6 MiB of gradients on two hosts sizes between 0.25 and 5 MiB did not differ at 0.5, 1 and 10
    Gbit/s. 25 MiB, where Li et al. (VLDB 2020, section 5.2) find no more gain on NCCL either, bound a copy's memory.
    """
    return min(max(total_bytes // 4, SMALLEST_BUCKET_PER_RANK * world_size), LARGEST_BUCKET)


class Bucket:
    """Gradients of one dtype and device that are reduced in one message.

    A bucket is one flat tensor, with a view of it for every gradient. It ends in one number per parameter that says
    whether this rank has a gradient for it: the sum of these over all ranks tells a gradient of zeros from none at all,
    without a message of its own.

    Attributes:
        params: the parameters, in order.
        flat: memory of their gradients, ``(elements,)``, and of one flag for each.
        wire: where the gradients of this rank are collected: ``flat`` itself, or what a carrier placed instead.
        missing: gradients that the current backward pass still owes.
        filled: whether the gradients of this step have been collected.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.params = list(params)
        first = self.params[0]
        step = max(1, ALIGN_BYTES // first.element_size())
        self._offsets, end = [], 0
        for param in self.params:
            self._offsets.append(end)
            end += -(-param.numel() // step) * step
        self._end = end
        # Zeros, since the gaps between aligned gradients are summed, too.
        self.flat = torch.zeros(end + len(self.params), dtype=first.dtype, device=first.device)
        self.views = self._cut(self.flat)
        self.place(self.flat)
        self._all_present = True
        self.missing = len(self.params)
        self.filled = False

    def place(self, wire: torch.Tensor) -> None:
        """Collect gradients in ``wire``, zeros as long as ``flat``."""
        self.wire = wire
        self._sent = self.views if wire is self.flat else self._cut(wire)

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the local gradients into ``wire``, zeros where there are none; each ``param.grad`` becomes a view."""
        self.filled = True
        targets, sources, absent = [], [], []
        for index, (param, view, sent) in enumerate(zip(self.params, self.views, self._sent, strict=True)):
            grad = param.grad
            if grad is None:
                sent.zero_()
                absent.append(index)
                continue
            if grad is not sent:
                targets.append(sent)
                sources.append(grad.to_dense() if grad.layout != torch.strided else grad)
            param.grad = view
        if targets:
            torch._foreach_copy_(targets, sources)
        flags = self.wire[self._end :]
        flags.fill_(1.0)
        self._all_present = not absent
        if absent:
            flags[absent] = 0.0

    def publish(self) -> None:
        """Make every ``param.grad`` its part of ``flat``, which now holds means; None where no rank has a gradient."""
        self.missing = len(self.params)
        self.filled = False
        if self._all_present:
            return
        # Only here are the flags read: on a GPU reading means waiting for it.
        anywhere = (self.flat[self._end :] > 0).tolist()
        for param, view, has_gradient in zip(self.params, self.views, anywhere, strict=True):
            param.grad = view if has_gradient else None

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [_view(flat, offset, param) for offset, param in zip(self._offsets, self.params, strict=True)]


def _view(flat: torch.Tensor, offset: int, param: torch.nn.Parameter) -> torch.Tensor:
    """A view with the strides of ``param`` where they are dense (channels_last), so that autograd adds in place."""
    part = flat[offset : offset + param.numel()]
    if not param.is_contiguous() and _is_dense(param):
        return part.as_strided(param.shape, param.stride())
    return part.view(param.shape)


def _is_dense(param: torch.Tensor) -> bool:
    """Whether the strides are those of some permutation of the axes, without gaps."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(param.stride(), param.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= length
    return True


def separate(params: Sequence[torch.nn.Parameter]) -> None:
    """Copy gradients that overlap another one in memory.

    Autograd gives two parameters the same memory where their gradients are views of one tensor, as in
    ``a.view(-1) + b.view(-1)``. Whatever changes gradients in place, a further backward pass or clipping by a norm,
    would then change them twice.
    """
    gradient_count = 0
    places = set()
    for param in params:
        grad = param.grad
        if grad is not None and grad.layout is torch.strided:
            places.add(grad.untyped_storage().data_ptr())
            gradient_count += 1
    if len(places) < gradient_count:
        _separate(params)


@torch.no_grad()
def _separate(params: Sequence[torch.nn.Parameter]) -> None:
    by_memory: dict[int, list[tuple[int, int, torch.nn.Parameter]]] = {}
    for param in params:
        grad = param.grad
        if grad is not None and grad.layout is torch.strided and grad.numel():
            extent = sum((length - 1) * stride for length, stride in zip(grad.shape, grad.stride(), strict=True)) + 1
            start = grad.data_ptr()
            end = start + extent * grad.element_size()
            by_memory.setdefault(grad.untyped_storage().data_ptr(), []).append((start, end, param))
    for spans in by_memory.values():
        spans.sort(key=lambda span: span[:2])
        furthest = 0
        for start, end, param in spans:
            if start < furthest:
                assert param.grad is not None
                param.grad = param.grad.clone()
            furthest = max(furthest, end)


def plan_buckets(
    ready: Sequence[torch.nn.Parameter],
    late: Sequence[torch.nn.Parameter],
    *,
    cap_bytes: int,
) -> list[Bucket]:
    """Fill buckets of at most ``cap_bytes``, or of one larger gradient each.

    Args:
        ready: parameters in the order in which a backward pass reaches them.
        late: parameters that it may not reach; they share no bucket with the others, which would wait for them.
        cap_bytes: most bytes of gradients in one bucket.
    """
    return [Bucket(params) for group in (ready, late) for params in _runs(group, cap_bytes)]


def _runs(params: Sequence[torch.nn.Parameter], cap_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Cut ``params`` into runs of one dtype and device, in the order in which the runs are complete."""
    runs: list[list[torch.nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for param in params:
        kind = (param.dtype, param.device)
        run = filling.setdefault(kind, [])
        run_elements = sum(member.numel() for member in run)
        if run and (run_elements + param.numel()) * param.element_size() > cap_bytes:
            runs.append(run)
            run = filling[kind] = []
        run.append(param)
    position = {id(param): index for index, param in enumerate(params)}
    runs.extend(filling.values())
    return sorted(runs, key=lambda run: position[id(run[-1])])
