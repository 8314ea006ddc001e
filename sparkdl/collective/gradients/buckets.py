"""Which gradients travel together: flat buckets, in the order in which a backward pass fills them.

Enters: parameters in that order. Leaves: buckets, each one flat tensor that is reduced in one message, with a view of
it for every gradient. A bucket ends in one number per parameter that says whether this rank has a gradient for it:
the sum of these over all ranks tells a gradient of zeros from none at all, without a message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Bucket", "plan_buckets", "separate"]

ALIGN_BYTES = 64
MAX_BUCKET_ELEMENTS = 2**31 - 1


class Bucket:
    """Gradients of one dtype and device that are reduced in one message.

    Attributes:
        params: the parameters, in order.
        flat: memory of their gradients, ``(elements,)``, and of one flag for each.
        wire: where the gradients of this rank are collected: ``flat`` itself, or what an exchange placed instead.
        share: what gradients are multiplied by on their way to ``wire``, while they stay where they are; None gives
            them a place in ``flat``.
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
        self._theirs: list[torch.Tensor] = []
        self._all_present = True
        self._flags_are_set = False
        self.missing = len(self.params)
        self.filled = False

    def place(self, wire: torch.Tensor, share: float | None = None) -> None:
        """Collect gradients, or their ``share``, in ``wire``, zeros as long as ``flat``."""
        self.wire, self.share = wire, share
        self._sent = self.views if wire is self.flat else self._cut(wire)
        self._flags, self._flags_are_set = wire[self._end :], False

    def face(self, other: torch.Tensor) -> None:
        """Add, from now on, what another rank collects in ``other``, its ``wire``."""
        self._theirs, self._their_flags = self._cut(other), other[self._end :]

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the local gradients into ``wire``, zeros where there are none."""
        self.filled = True
        absent = self._move() if self.share is None else self._copy(self.share)
        self._all_present = not absent
        if absent:
            flags = torch.ones(len(self.params), dtype=self._flags.dtype)
            flags[absent] = 0.0
            self._flags.copy_(flags)
            self._flags_are_set = False
        elif not self._flags_are_set:
            self._flags.fill_(1.0)
            self._flags_are_set = self.share is not None  # elsewhere they are summed in place

    def _move(self) -> list[int]:
        """Copy the gradients, and make each ``param.grad`` a view of ``flat``; return which there are none of."""
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
        return absent

    def _copy(self, share: float) -> list[int]:
        """Copy the ``share`` of the gradients, which stay where they are; return which there are none of."""
        absent = []
        for index, (param, sent) in enumerate(zip(self.params, self._sent, strict=True)):
            grad = param.grad
            if grad is None:
                sent.zero_()
                absent.append(index)
                continue
            if grad.layout is not torch.strided:
                grad = param.grad = grad.to_dense()
            torch.mul(grad, share, out=sent)
        return absent

    @torch.no_grad()
    def add(self) -> None:
        """Add to the ``share`` of each gradient what the rank this one faces has collected, in place.

        One pass over each gradient, which nobody copies back: the memory, not the sums, is what this costs.
        """
        assert self.share is not None
        there = [True] * len(self.params) if self._all_present else (self._their_flags > 0).tolist()
        for param, view, added, present in zip(self.params, self.views, self._theirs, there, strict=True):
            grad = param.grad
            if grad is not None:
                torch.add(added, grad, alpha=self.share, out=grad)
            elif present:
                param.grad = view.copy_(added)

    def publish(self) -> None:
        """Make every ``param.grad`` its part of ``flat``, which now holds means; None where no rank has a gradient."""
        self.missing = len(self.params)
        self.filled = False
        if self.share is not None or self._all_present:
            return
        # Only here are the flags read: on a GPU reading means waiting for it.
        anywhere = (self.flat[self._end :] > 0).tolist()
        for param, view, there in zip(self.params, self.views, anywhere, strict=True):
            param.grad = view if there else None

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
    found = 0
    places = set()
    for param in params:
        grad = param.grad
        if grad is not None and grad.layout is torch.strided:
            places.add(grad.untyped_storage().data_ptr())
            found += 1
    if len(places) < found:
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
        held = sum(other.numel() for other in run)
        if run and (held + param.numel()) * param.element_size() > cap_bytes:
            runs.append(run)
            run = filling[kind] = []
        run.append(param)
    position = {id(param): index for index, param in enumerate(params)}
    runs.extend(filling.values())
    return sorted(runs, key=lambda run: position[id(run[-1])])
