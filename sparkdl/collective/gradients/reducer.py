"""Gradient synchronisation for both backends: the way of a gradient from ``backward()`` to the optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from sparkdl import observe
from sparkdl.collective.agree import named_parameters, share_optimizer
from sparkdl.collective.base import Ranks
from sparkdl.collective.gradients.batch_norm import synchronise_norms
from sparkdl.collective.gradients.buckets import Bucket, bucket_bytes, plan_buckets, separate
from sparkdl.collective.gradients.buffers import BufferSharing
from sparkdl.collective.gradients.carrier import WIRE_DTYPES, open_carrier
from sparkdl.collective.gradients.sparse import average_sparse, sparse_parameters
from sparkdl.config import SyncConfig
from sparkdl.errors import ConfigError
from sparkdl.nn.mixture import mixtures, share_tokens, stand_in


class Reducer:
    """Keeps the gradients of one model equal on all ranks: see ``GradientSync``.

    The way of a gradient::

        backward() -> _on_gradient: the last gradient of a bucket is there -> _launch: carrier.send(bucket)
        synchronize(): _launch what has not left -> carrier.receive(buckets) -> bucket.publish(): every param.grad

    The design follows Li et al., "PyTorch Distributed" (VLDB 2020), section 3.2: gradients are copied into flat buckets
    in the order in which the backward pass produces them, and a full bucket is reduced at once. It differs in one point
    that exact tails need: the passes of a step are joined by ``synchronize()``, not by the forward pass, so a rank
    whose local batch is empty, or which reaches other parameters than its peers, sends zeros and no rank waits for
    ever.

    Where the carrier overlaps nothing (shared memory: what copies and adds is what computes), all buckets leave in
    ``synchronize()`` and no hook sits on a parameter: small calls between the large matrix products of a backward pass
    find their code gone from the cache and take ten times as long as in a row.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: SyncConfig,
    ) -> None:
        self._ranks = ranks
        self._model, self._optimizer = model, optimizer
        self._wire_dtype = WIRE_DTYPES.get(config.compression)
        self._names = named_parameters(model, optimizer)
        self._params = list(self._names)
        self._sparse = sparse_parameters(model)
        self._trained: dict[torch.nn.Parameter, None] = {}
        self._handles: list[RemovableHandle] = []
        self._bucket_of: dict[torch.nn.Parameter, Bucket] = {}
        self._buckets: list[Bucket] = []
        self._plans = 0
        self._order: dict[torch.nn.Parameter, None] = {}
        self._next_layout: tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]] | None = None
        self._local = False
        self._reset()
        self._norms = synchronise_norms(model, ranks, config.sync_batch_norm)
        self._shares_tokens = ranks.world.size > 1 and bool(mixtures(model))
        if self._shares_tokens:
            share_tokens(model, ranks)
        self.share_buffers = BufferSharing(model, ranks)
        self._carrier = open_carrier(ranks, self._params, config)
        self._in_order = not self._carrier.overlaps  # what leaves behind the backward pass needs no order
        self._adopt_trainable()
        dense = self._dense()
        self._bucket_bytes = sys.maxsize  # one bucket: cutting pays where the first ones leave early
        if self._carrier.overlaps:
            total = sum(param.numel() * param.element_size() for param in dense)
            bucket_mib = config.bucket_mib
            self._bucket_bytes = (
                bucket_bytes(total, ranks.world.size) if bucket_mib is None else int(bucket_mib * 2**20)
            )
        # A backward pass ends with the first layers: what leaves meanwhile starts with the last ones, and what leaves
        # behind it with those that are still in the cache.
        self._plan(ready=dense[::-1] if self._carrier.overlaps else dense, late=[])

    @property
    def carried_by(self) -> str:
        """What carries the gradients, as logs and records say it."""
        return self._carrier.name

    @property
    def model(self) -> torch.nn.Module:
        """The user's own module: hooks sit on its parameters, not around it."""
        return self._model

    @property
    def forward_is_collective(self) -> bool:
        """Whether batch norm waits for the other ranks in both passes, or a mixture of experts in the forward pass."""
        return self._norms is not None or self._shares_tokens

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside only add to the local gradients."""
        earlier, self._local = self._local, True
        try:
            yield
        finally:
            self._local = earlier
        separate(self._params)

    @contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """Forward passes inside are of rows whose gradients the caller multiplies by ``weight`` afterwards."""
        with ExitStack() as contexts:
            if self._norms is not None:
                contexts.enter_context(self._norms.weighted(weight))
            if self._shares_tokens and weight == 0:
                contexts.enter_context(stand_in(self._model))
            yield

    def share_optimizer(self) -> None:
        """Give all ranks the state of rank 0's optimizer."""
        with torch.no_grad():
            share_optimizer(self._ranks, self._optimizer)

    def synchronize(self, weight: float = 1.0) -> None:
        """Wait until every ``param.grad`` holds the mean over all ranks, or what Adasum makes of them."""
        if self._next_layout is not None:
            self._lay_out_anew()
        self._adopt_unfrozen()
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket)
        if self._sparse:
            average_sparse(self._ranks, [p for p in self._params if p in self._sparse], self._wire_dtype)
        self._carrier.receive(self._buckets, weight)
        for bucket in self._buckets:
            bucket.publish()
        self._reset()
        if not self._in_order:
            self._follow_rank_0()

    def state_dict(self) -> dict[str, Any]:
        """Return the layout of the buckets, by which rings of three and more ranks round."""
        if self._next_layout is not None:
            self._lay_out_anew()
        return {
            "world_size": self._ranks.world.size,
            "bucket_bytes": self._bucket_bytes,
            "buckets": [[self._names[param] for param in bucket.params] for bucket in self._buckets],
            "late": [self._names[param] for param in self._late],
            "settled": self._in_order and self._carrier.overlaps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lay the buckets out as they were."""
        if state.get("world_size") != self._ranks.world.size or state.get("bucket_bytes") != self._bucket_bytes:
            return
        by_name = {self._names[param]: param for param in self._dense()}
        names = [name for bucket in state["buckets"] for name in bucket]
        if sorted(names) != sorted(by_name):
            return  # other parameters are trained: the first step shows their order
        late = set(state["late"])
        self._next_layout = None
        self._ready = [by_name[name] for name in names if name not in late]
        self._late = [by_name[name] for name in state["late"]]
        self._in_order = bool(state["settled"]) or not self._carrier.overlaps
        self._lay_out([Bucket([by_name[name] for name in bucket]) for bucket in state["buckets"]])

    def rank_state(self) -> dict[str, Any]:
        """What this rank has not sent so far, where gradients are compressed."""
        return self._carrier.rank_state(self._params)

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Send what was left to send."""
        self._carrier.load_rank_state(state, self._params)

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._carrier.close()
        self._buckets, self._bucket_of = [], {}
        if self._norms is not None:
            self._norms.undo()
            self._norms = None
        if self._shares_tokens:
            share_tokens(self._model, None)
            self._shares_tokens = False

    def _dense(self) -> list[torch.nn.Parameter]:
        return [param for param in self._params if param in self._trained and param not in self._sparse]

    def _adopt_trainable(self) -> list[torch.nn.Parameter]:
        """Take in the parameters that take gradients and did not so far; return them."""
        fresh = [param for param in self._params if param.requires_grad and param not in self._trained]
        self._trained |= dict.fromkeys(fresh)
        if self._carrier.overlaps:
            for param in fresh:
                handle = param.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        return fresh

    def _adopt_unfrozen(self) -> None:
        """Parameters that were unfrozen since the last step get buckets at the end, and a better place next step."""
        if len(self._trained) == len(self._params):
            return
        fresh = [param for param in self._adopt_trainable() if param not in self._sparse]
        if fresh:
            self._add(plan_buckets([], fresh, cap_bytes=self._bucket_bytes))
            self._in_order = not self._carrier.overlaps
            self._order = {}

    def _plan(self, ready: Sequence[torch.nn.Parameter], late: Sequence[torch.nn.Parameter]) -> None:
        self._ready, self._late = list(ready), list(late)
        self._lay_out(plan_buckets(ready, late, cap_bytes=self._bucket_bytes))

    def _lay_out(self, buckets: list[Bucket]) -> None:
        """Put ``buckets`` in the place of those before; every rank calls it with the same ones."""
        self._plans += 1
        self._buckets, self._bucket_of = [], {}
        self._add(buckets)

    def _add(self, buckets: list[Bucket]) -> None:
        self._carrier.place(buckets)
        self._buckets += buckets
        self._bucket_of |= {param: bucket for bucket in buckets for param in bucket.params}

    def _reset(self) -> None:
        self._launched = 0
        self._arrived: set[torch.nn.Parameter] = set()

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        """Called by autograd each time it has added to ``param.grad``."""
        if self._next_layout is not None:
            self._lay_out_anew()
        if not self._in_order:
            self._order.setdefault(param)
        if self._local or param in self._sparse:
            return
        bucket = self._bucket_of[param]
        if bucket.filled:
            raise ConfigError(
                f"{self._names[param]} got a second gradient after its first was sent: run all backward passes of a "
                "step but the last inside accumulate()"
            )
        if param in self._arrived:
            return
        self._arrived.add(param)
        bucket.missing -= 1
        while self._launched < len(self._buckets) and self._buckets[self._launched].missing == 0:
            self._launch(self._buckets[self._launched])

    def _launch(self, bucket: Bucket) -> None:
        # Every rank launches the buckets in the order of the list, whatever order they filled in.
        self._carrier.send(bucket, f"bucket.{self._plans}.{self._launched}")
        self._launched += 1

    def _follow_rank_0(self) -> None:
        """Let the next step's buckets be in the order that rank 0's first backward pass showed."""
        numbers = {param: index for index, param in enumerate(self._params)}
        order = self._ranks.broadcast_object([numbers[param] for param in self._order])
        if not order:
            return  # rank 0 ran no backward pass so far: ask again after the next step
        self._in_order = True
        ready = [self._params[index] for index in order]
        dense = self._dense()
        ready_set = set(ready)
        # The gradients of this step lie in the buckets that there are: new ones beside them would double the memory.
        self._next_layout = (
            [param for param in ready if param not in self._sparse],
            [param for param in dense if param not in ready_set],
        )

    def _lay_out_anew(self) -> None:
        """Put the buckets that ``_follow_rank_0`` found in the place of those before, whose gradients are used up."""
        assert self._next_layout is not None
        (ready, late), self._next_layout = self._next_layout, None
        self._buckets, self._bucket_of = [], {}
        self._plan(ready, late)
        if self._ranks.world.rank == 0:
            observe.logger.debug("%d buckets of at most %d bytes", len(self._buckets), self._bucket_bytes)
