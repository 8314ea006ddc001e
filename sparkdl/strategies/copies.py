"""Gradients averaged over the copies of a model in a mesh, bucket by bucket, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collective.gradients.buckets import Bucket, bucket_bytes, plan_buckets
from sparkdl.errors import ConfigError


class CopiesAverage:
    """Averages the gradients of parameters over the ranks that hold copies of them.

    A parameter may be a DTensor: the gradient of this rank's part of it goes over to the part, a plain tensor, where
    the backward pass did not give it to the part.

    As ``collective.gradients.reducer`` does for a model that is whole on every rank: a bucket leaves once its last
    gradient is there, buckets leave in one order on all ranks, and what a backward pass did not reach leaves at the
    end. A gradient that some ranks lack counts as zero there; one that all lack stays None.

    Args:
        parameter_of: by this rank's part of it, or by itself where that is all, each parameter in the order of the
            model; equal in number and shapes on all ranks of ``group``. Those that take no gradients travel once they
            do.
        group: the ranks with copies, of which nobody else makes use while a backward pass goes on.
        guard: of the collective: turns the errors of its operations into ``UnreachableError``.
    """

    def __init__(
        self,
        parameter_of: Mapping[torch.nn.Parameter, torch.nn.Parameter],
        group: dist.ProcessGroup,
        guard: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._parameter_of, self._group, self._guard = dict(parameter_of), group, guard
        self._size = dist.get_world_size(group)
        self._buckets: list[Bucket] = []
        self._missing: list[dict[torch.nn.Parameter, int]] = []  # by bucket, gradients to be added yet by parameter
        self._bucket_of: dict[torch.nn.Parameter, int] = {}
        self._handles: list[Any] = []
        self._launched: list[Any] = []
        self._is_sending = False
        self._take_in_trained()

    def _take_in_trained(self) -> None:
        """Make buckets of the parameters that take gradients and have none so far."""
        fresh = [
            part
            for part, parameter in self._parameter_of.items()
            if parameter.requires_grad and parameter not in self._bucket_of
        ]
        fresh.reverse()  # a backward pass reaches the last layers first
        most = bucket_bytes(sum(part.nbytes for part in fresh), self._size)
        for bucket in plan_buckets(fresh, [], cap_bytes=most):
            for part in bucket.params:
                parameter = self._parameter_of[part]
                self._bucket_of[parameter] = len(self._buckets)
                call = partial(self._on_gradient, parameter)
                for taker in {part: None, parameter: None}:
                    handle = taker.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)
            self._buckets.append(bucket)
            self._missing.append({})

    def begin(self, passes: int = 1) -> None:
        """Let gradients leave in the backward passes that follow: each once it was added to so many times."""
        self._is_sending = True
        self._missing = [
            dict.fromkeys((self._parameter_of[part] for part in bucket.params), passes) for bucket in self._buckets
        ]

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not left, and wait until every gradient is the mean over all copies."""
        self._take_in_trained()
        while len(self._launched) < len(self._buckets):
            self._launch()
        for bucket, work in zip(self._buckets, self._launched, strict=True):
            with self._guard("averaging gradients"):
                work.wait()
            bucket.publish()
        self._launched.clear()
        self._is_sending = False

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _on_gradient(self, parameter: torch.nn.Parameter, _: torch.nn.Parameter) -> None:
        if not self._is_sending:
            return
        missing = self._missing[self._bucket_of[parameter]]
        if parameter not in missing:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient after the last one of the step was "
                "sent: run one backward pass a batch"
            )
        missing[parameter] -= 1
        if missing[parameter] == 0:
            del missing[parameter]
        while len(self._launched) < len(self._buckets) and not self._missing[len(self._launched)]:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[len(self._launched)]
        for part in bucket.params:
            parameter: Any = self._parameter_of[part]
            if part is not parameter and parameter.grad is not None:
                part.grad, parameter.grad = parameter.grad.to_local(), None
        bucket.fill()
        with self._guard("averaging gradients"):
            self._launched.append(dist.all_reduce(bucket.flat, dist.ReduceOp.AVG, self._group, async_op=True))
