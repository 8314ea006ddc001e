"""The optimizer's state in parts, one a rank: ZeRO stage 1 (Rajbhandari et al., SC 2020), by torch's own wrapper."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from sparkdl.collective.base import Collective, on_leader
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies.all_reduce import AllReduce, fitting
from sparkdl.strategies.base import TaskView

__all__ = ["Zero1"]


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
        """Build as ``AllReduce`` does, then leave this rank's part of the optimizer.

        Raises:
            ConfigError: the parameters are of several dtypes or devices.
        """
        super().build(make_model, make_optimizer, call)
        if not self._splits:
            return
        from torch.distributed.optim import ZeroRedundancyOptimizer

        user_optimizer = self.optimizer

        def part(groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
            """The user's own optimizer, with what it keeps beside its groups, over this rank's parameters."""
            params = {param for group in groups for param in group["params"]}
            user_optimizer.state = defaultdict(
                dict, {param: state for param, state in user_optimizer.state.items() if param in params}
            )
            user_optimizer.param_groups = groups
            return user_optimizer

        try:
            groups = [dict(group) for group in user_optimizer.param_groups]
            self.optimizer = ZeroRedundancyOptimizer(groups, part, **user_optimizer.defaults)  # type: ignore[arg-type]
        except ValueError as cause:
            raise ConfigError(
                f"strategy='zero1' cannot split this optimizer ({cause}): choose strategy='all_reduce'"
            ) from cause

    def check_parameters(self) -> None:
        """Also refuse parameters that groups have got: the wrapper deals out whole groups."""
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
        own_states = {numbers[param]: state for param, state in optimizer.optim.state.items()}
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
        own_params, own_states = set(_parameters(optimizer.optim)), {}
        for number, param in enumerate(_parameters(optimizer)):
            part = self.collective.broadcast_object(state["state"].get(number) if state is not None else None)
            if param in own_params and part is not None:
                own_states[number] = part
        with fitting("optimizer"):
            optimizer.load_state_dict({"state": own_states, "param_groups": groups})


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
