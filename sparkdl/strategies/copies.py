"""Gradients averaged over the copies of a model in a mesh, bucket by bucket, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collective.gradients.buckets import bucket_bytes
from sparkdl.errors import ConfigError

__all__ = ["CopiesAverage"]


class CopiesAverage:
    """Averages the gradients of parameters, whole or parts of DTensors, over the ranks that hold copies of them.

    As ``collective.gradients.reducer`` does for a model that is whole on every rank: a bucket leaves once its last
    gradient is there, buckets leave in one order on all ranks, and what a backward pass did not reach leaves at the
    end. A gradient that some ranks lack counts as zero there; one that all lack stays None.

    Args:
        parameters: in the order of the model; equal in number and shapes on all ranks of ``group``. Those that take no
            gradients travel once they do.
        group: the ranks with copies, of which nobody else makes use while a backward pass goes on.
        guard: of the collective: turns the errors of its operations into ``ClusterError``.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        group: dist.ProcessGroup,
        guard: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._parameters, self._group, self._guard = list(parameters), group, guard
        self._size = dist.get_world_size(group)
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, _Bucket] = {}
        self._handles: list[Any] = []
        self._launched: list[Any] = []
        self._is_sending = False
        self._take_in_trained()

    def _take_in_trained(self) -> None:
        """Make buckets of the parameters that take gradients and have none so far."""
        fresh = [each for each in self._parameters if each.requires_grad and each not in self._bucket_of]
        fresh.reverse()  # a backward pass reaches the last layers first
        for run in _runs(fresh, bucket_bytes(sum(_local(parameter).nbytes for parameter in fresh), self._size)):
            self._buckets.append(_Bucket(run))
            self._bucket_of |= dict.fromkeys(run, self._buckets[-1])
        self._handles += [_hook(parameter, self._on_gradient) for parameter in fresh]

    def begin(self, passes: int = 1) -> None:
        """Let gradients leave in the backward passes that follow: each once it was added to so many times."""
        self._is_sending = True
        for bucket in self._buckets:
            bucket.missing = dict.fromkeys(bucket.parameters, passes)

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not left, and wait until every gradient is the mean over all copies."""
        self._take_in_trained()
        while len(self._launched) < len(self._buckets):
            self._launch()
        for bucket, work in zip(self._buckets, self._launched, strict=True):
            with self._guard("averaging gradients"):
                work.wait()
            bucket.publish(self._size)
        self._launched.clear()
        self._is_sending = False

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self._is_sending:
            return
        missing = self._bucket_of[parameter].missing
        if parameter not in missing:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient after the last one of the step was "
                "sent: run one backward pass a batch"
            )
        missing[parameter] -= 1
        if missing[parameter] == 0:
            del missing[parameter]
        while len(self._launched) < len(self._buckets) and not self._buckets[len(self._launched)].missing:
            self._launch()

    def _launch(self) -> None:
        flat = self._buckets[len(self._launched)].fill()
        with self._guard("averaging gradients"):
            self._launched.append(dist.all_reduce(flat, group=self._group, async_op=True))


class _Bucket:
    """Gradients that travel in one message, behind each other, and then one number for each: whether it is there.

    Attributes:
        parameters: of one dtype, on one device.
        missing: how many gradients are to be added yet, by parameter; a parameter that has all is not in it.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.missing: dict[torch.nn.Parameter, int] = {}
        parts = [_local(parameter) for parameter in self.parameters]
        self._elements = sum(part.numel() for part in parts)
        self._flat = parts[0].new_zeros(self._elements + len(parts))
        pieces = self._flat[: self._elements].split([part.numel() for part in parts])  # type: ignore[no-untyped-call]
        self._views = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        gradients = zip(self._views, self.parameters, strict=True)
        self._gradients = [_like(view, parameter) for view, parameter in gradients]
        self._is_whole = True

    def fill(self) -> torch.Tensor:
        """Collect the gradients of this rank; each ``grad`` becomes its part of what is returned."""
        targets, sources, absent = [], [], []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self._views[index].zero_()
                absent.append(index)
            elif parameter.grad is not self._gradients[index]:
                targets.append(self._views[index])
                sources.append(_local(parameter.grad))
            parameter.grad = self._gradients[index]
        if targets:
            torch._foreach_copy_(targets, sources)
        flags = self._flat[self._elements :]
        flags.fill_(1.0)
        flags[absent] = 0.0
        self._is_whole = not absent
        return self._flat

    def publish(self, size: int) -> None:
        """Make means of the sums over ``size`` ranks; take away gradients that no rank has."""
        self._flat /= size
        if self._is_whole:
            return  # on a GPU, reading the flags would be waiting for it
        for parameter, share in zip(self.parameters, self._flat[self._elements :].tolist(), strict=True):
            if share == 0:
                parameter.grad = None


def _hook(parameter: torch.nn.Parameter, call: Callable[[torch.nn.Parameter], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


def _runs(parameters: Sequence[torch.nn.Parameter], most: int) -> list[list[torch.nn.Parameter]]:
    """Cut ``parameters`` into runs of one dtype and device, of at most ``most`` bytes or one parameter."""
    runs: list[list[torch.nn.Parameter]] = []
    held, kind = 0, None
    for parameter in parameters:
        part = _local(parameter)
        if not runs or held + part.nbytes > most or (part.dtype, part.device) != kind:
            runs.append([])
            held, kind = 0, (part.dtype, part.device)
        runs[-1].append(parameter)
        held += part.nbytes
    return runs


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of ``tensor``."""
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return part


def _like(part: torch.Tensor, parameter: Any) -> torch.Tensor:
    """This rank's part of a gradient as ``parameter`` takes it."""
    if not hasattr(parameter, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    whole: torch.Tensor = DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, **layout
    )
    return whole
