"""The optimizer's state in parts, one a rank: ZeRO stage 1 (Rajbhandari et al., SC 2020)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collective.base import Collective, on_leader
from sparkdl.collective.pairwise import give_to_all
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies.all_reduce import AllReduce, fitting
from sparkdl.strategies.base import TaskView

_ROUND_BYTES = 16 << 20
"""The bytes of parameters that travel at once, from all ranks together: so much memory a step takes besides."""


class Zero1(AllReduce):
    """Each rank keeps the state of its part of the parameters, steps them, and gives them to the others.

    Model and gradients are whole on every rank, as with ``all_reduce``, and so are the weights, bit for bit: as far as
    the optimizer steps each parameter by itself, as all of ``torch.optim`` but LBFGS do.
    """

    allows_own_steps = False  # such a step may call the optimizer on some ranks more often than on others

    def __init__(self, collective: Collective, config: TrainConfig) -> None:
        super().__init__(collective, config)
        self._splits = collective.world.size > 1
        self._group_sizes: list[int] = []
        if collective.name == "horovod":
            raise ConfigError(
                "strategy='zero1' splits the optimizer by torch.distributed, and backend='horovod' opens no group of "
                "it: choose backend='torch', or strategy='all_reduce'"
            )

    def build(
        self,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        call: TaskView,
    ) -> None:
        """Build as ``AllReduce`` does, then leave this rank's part of the optimizer."""
        super().build(make_model, make_optimizer, call)
        if self._splits:
            self.optimizer = _Dealt(self.optimizer, self.collective.world.rank, self.collective.world.size)

    def check_parameters(self) -> None:
        """Refuse parameters that groups have got, too: they are dealt out when a group is added."""
        super().check_parameters()
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        earlier_sizes, self._group_sizes = self._group_sizes, sizes
        if self._splits and sizes[: len(earlier_sizes)] != earlier_sizes:
            raise ConfigError(
                f"groups of {earlier_sizes} parameters of the optimizer have {sizes[: len(earlier_sizes)]} by now, and "
                "strategy='zero1' has dealt them out: give parameters to optimizer.add_param_group, or choose "
                "strategy='all_reduce'"
            )

    def optimizer_state(self) -> dict[str, Any] | None:
        """Gather the parts, one rank after the other, so that only the leader holds them all."""
        if not self._splits:
            return super().optimizer_state()
        optimizer: Any = self.optimizer
        world, numbers = self.collective.world, {param: i for i, param in enumerate(_parameters(optimizer))}
        own_states = {numbers[param]: state for param, state in optimizer.own.state.items()}
        states: dict[int, Any] = {}
        for rank in range(world.size):
            part = self.collective.broadcast_object(own_states if rank == world.rank else None, rank)
            if world.is_leader:
                states |= part
        if not world.is_leader:
            return None
        counted = iter(range(len(numbers)))
        groups = [group | {"params": [next(counted) for _ in group["params"]]} for group in optimizer.param_groups]
        return {"state": dict(sorted(states.items())), "param_groups": groups}

    def load_optimizer_state(self, state: dict[str, Any] | None) -> None:
        """Send the leader's ``state`` round, one parameter's at a time, of which each rank keeps its own."""
        if not self._splits:
            super().load_optimizer_state(state)
            return
        optimizer: Any = self.optimizer

        def groups_of_state() -> list[dict[str, Any]]:
            assert state is not None
            with fitting("optimizer"):
                saved_sizes, own_sizes = (
                    [len(g["params"]) for g in e] for e in (state["param_groups"], optimizer.param_groups)
                )
                if saved_sizes != own_sizes:
                    raise ValueError(f"groups of {saved_sizes} parameters for groups of {own_sizes}")
            return state["param_groups"]  # type: ignore[no-any-return]

        groups = on_leader(self.collective, groups_of_state)
        own_params, own_states = set(_parameters(optimizer.own)), {}
        for number, param in enumerate(_parameters(optimizer)):
            part = self.collective.broadcast_object(state["state"].get(number) if state is not None else None)
            if param in own_params and part is not None:
                own_states[param] = part
        with fitting("optimizer"):
            optimizer.load(own_states, groups)


class _Dealt(torch.optim.Optimizer):
    """Has the groups of all parameters; steps an optimizer of this rank's part, then gets the others from their ranks.

    Args:
        optimizer: of all parameters, in any state; it keeps this rank's.
        rank: of this process.
        ranks: how many there are.

    Attributes:
        own: the optimizer over this rank's part.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> None:
        self.own, self._rank = optimizer, rank
        self._parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        self._trained: list[bool] = []  # which of the parts moved when the rounds were cut
        self._rounds: list[tuple[list[torch.Tensor], ...]] = []  # what each rank gives at once
        groups, optimizer.param_groups = [dict(group) for group in optimizer.param_groups], []
        super().__init__(groups, optimizer.defaults)  # which adds the groups
        kept = set(self._parts[rank])
        states = {param: state for param, state in optimizer.state.items() if param in kept}
        self.state = optimizer.state = defaultdict(dict, states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add it, and deal its parameters, the largest first, each to the rank that has least so far.

        Those that are trained and those that are frozen are dealt each by themselves, so that all ranks step about as
        much; a parameter stays with its rank whether it is frozen or thawed later.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for is_trained in (True, False):
            numbers = [sum(p.numel() for p in part if p.requires_grad == is_trained) for part in self._parts]
            dealt = [param for param in group["params"] if param.requires_grad == is_trained]
            for param in sorted(dealt, key=torch.numel, reverse=True):
                rank = numbers.index(min(numbers))
                numbers[rank] += param.numel()
                self._parts[rank].append(param)
        kept = set(self._parts[self._rank])
        self.own.param_groups.append({**group, "params": [param for param in group["params"] if param in kept]})
        self._trained = []

    def _cut_rounds(self) -> None:
        """Cut anew what travels where other parameters are trained than before; all ranks freeze and thaw alike."""
        trained = [_is_trained(param) for part in self._parts for param in part]
        if trained != self._trained:
            moving = [[param for param in part if _is_trained(param)] for part in self._parts]
            pieces = [_pieces(part, _ROUND_BYTES // len(self._parts)) for part in moving]
            self._trained, self._rounds = trained, list(itertools.zip_longest(*pieces, fillvalue=[]))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's part with what its groups say by now, and get the other parts."""
        pairs = list(zip(self.param_groups, self.own.param_groups, strict=True))
        for group, own_group in pairs:
            own_group.update(_settings(group))
        loss = self.own.step(closure) if closure is not None else self.own.step()
        for group, own_group in pairs:
            group.update(_settings(own_group))
        self._share()
        return loss

    def load(self, states: dict[torch.Tensor, Any], groups: list[dict[str, Any]]) -> None:
        """Take over the states of this rank's parameters, and the settings of all groups."""
        own_params = _parameters(self.own)
        counted = iter(range(len(own_params)))
        own_groups = [
            {**_settings(group), "params": [next(counted) for _ in own_group["params"]]}
            for group, own_group in zip(groups, self.own.param_groups, strict=True)
        ]
        numbered = {number: states[param] for number, param in enumerate(own_params) if param in states}
        self.own.load_state_dict({"state": numbered, "param_groups": own_groups})
        self.state = self.own.state
        for group, own_group in zip(self.param_groups, self.own.param_groups, strict=True):
            group.update(_settings(own_group))

    @torch.no_grad()
    def _share(self) -> None:
        """Give this rank's part to the others, and get theirs."""
        assert dist.group.WORLD is not None
        self._cut_rounds()
        for of_ranks in self._rounds:
            device = next(param.device for piece in of_ranks for param in piece)
            flat = [_room(piece, device) for piece in of_ranks]
            for param, values in _places(of_ranks[self._rank], flat[self._rank]):
                values.copy_(param)
            give_to_all(flat, dist.group.WORLD)
            for rank, piece in enumerate(of_ranks):
                if rank != self._rank:
                    for param, values in _places(piece, flat[rank]):
                        param.copy_(values)


def _is_trained(param: torch.Tensor) -> bool:
    """Whether a step may move it: one that was frozen behind the backward pass has a gradient of it."""
    return param.requires_grad or param.grad is not None


def _pieces(params: Iterable[torch.Tensor], most_bytes: int) -> list[list[torch.Tensor]]:
    """Parameters that travel together: of one dtype, and no more than so many bytes, but for a larger one alone."""
    pieces: list[list[torch.Tensor]] = []
    size = 0
    for param in params:
        if not pieces or param.dtype != pieces[-1][-1].dtype or size + param.nbytes > most_bytes:
            pieces.append([])
            size = 0
        pieces[-1].append(param)
        size += param.nbytes
    return pieces


def _room(piece: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Room for what a piece holds, one behind the other."""
    return torch.empty(sum(p.numel() for p in piece), dtype=piece[0].dtype if piece else torch.uint8, device=device)


def _places(piece: list[torch.Tensor], flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter of a piece, and the part of ``flat`` that is its own, in its shape."""
    first = 0
    for param in piece:
        yield param, flat[first : first + param.numel()].view(param.shape)
        first += param.numel()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
