"""One model spread over a mesh of ranks: copies, shards, splits and stages, in any product that ``Mesh`` allows."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import optim
from torch.nn.modules.batchnorm import _NormBase

from sparkdl.collective.agree import agree_on_tensors
from sparkdl.collective.base import Collective, on_leader
from sparkdl.collective.gradients.batch_norm import synchronise_norms
from sparkdl.collective.gradients.buffers import BufferSharing
from sparkdl.compat.gloo_all_gather import replace_all_gather
from sparkdl.compat.recomputed import recompute
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.nn.mixture import MixtureOfExperts, mixtures, share_tokens, stand_in
from sparkdl.strategies import expert, stage_balance, stages, tensor, tensor_plan
from sparkdl.strategies.all_reduce import fitting
from sparkdl.strategies.base import StepObjective, Strategy, TaskView
from sparkdl.strategies.copies import CopiesAverage
from sparkdl.strategies.expert import GroupTokens
from sparkdl.strategies.file_tensors import in_file, in_memory, parameters_in_files
from sparkdl.strategies.mesh import DIMENSIONS, READERS, Mesh
from sparkdl.strategies.pipeline import Pipeline
from sparkdl.strategies.sharded import Messages, blocks_of, recomputable, shard, ungather

_ELEMENTWISE = {
    *(optim.SGD, optim.ASGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.Adagrad, optim.Adadelta),
}
"""Optimizers of torch that step each number by its own gradients alone, so that each rank may step its part."""


class MeshStrategy(Strategy):
    """See ``Strategy``. The model is made whole on each rank, and then cut.

    On CPUs it lies in files meanwhile, and so does what the leader gathers: no rank needs memory for all of it. A GPU
    holds its weights for that moment. After ``build`` each parameter is a DTensor, a plain tensor that is equal on all
    ranks of its stage, or, of another stage, on the meta device.

    Args:
        collective: the ranks, over torch.distributed where there are several.
        config: of the training.
        mesh: how they are used.

    Raises:
        ConfigError: the mesh does not fit the ranks, the backend or the training.
    """

    def __init__(self, collective: Collective, config: TrainConfig, mesh: Mesh) -> None:
        super().__init__(collective, config)
        world = collective.world
        self.mesh = mesh = mesh.filled(world.size)
        if collective.name == "horovod":
            raise ConfigError(
                f"strategy='{mesh}' needs groups of ranks, and backend='horovod' opens none: choose backend='torch', "
                "or strategy='all_reduce'"
            )
        check_training(mesh, config, world.device)
        hosts = collective.all_gather_object((world.node_rank, world.local_rank))
        by_host = sorted(range(world.size), key=lambda rank: hosts[rank])  # neighbours in the mesh share a host
        self._places = {rank: mesh.place(number) for number, rank in enumerate(by_host)}
        self._place = self._places[world.rank]
        stages = [[rank for rank in by_host if self._places[rank].pipeline == s] for s in range(mesh.sizes()[0])]
        self._leaders = [min(ranks) for ranks in stages]
        self.data_rank, self.data_size = self._place.reader, mesh.readers
        self._devices: Any = None
        self._dense: Any = None
        self._groups: dict[tuple[str, ...], Any] = {}
        if world.size > 1:
            from torch.distributed.device_mesh import DeviceMesh

            replace_all_gather()
            device = torch.device(world.device).type
            grid = torch.tensor(by_host).reshape(mesh.sizes())
            self._devices = self._dense = DeviceMesh(device, grid, mesh_dim_names=DIMENSIONS)
            if mesh.expert != 1 and mesh.shard != 1:  # what is no expert is cut over the ranks of both
                sizes = (*mesh.sizes()[:2], -1, mesh.sizes()[-1])
                names = tuple(dimension for dimension in DIMENSIONS if dimension != "expert")
                self._dense = DeviceMesh(device, grid.reshape(sizes), mesh_dim_names=names)
        self._norms: Any = None
        self._pipeline: Pipeline | None = None
        self._averages: list[CopiesAverage] = []
        self._messages: Messages | None = None
        self._mixtures = False
        self._storages: dict[torch.nn.Parameter, torch.UntypedStorage] = {}

    def counts_rows(self) -> bool:
        """Whether this rank is of the last stage, and the first of those that compute the same there."""
        return self._place.counts

    def counts_layers(self) -> bool:
        """Whether this rank is the first of its tensor group: each stage of a pipeline has layers of its own."""
        return self._place.tensor == 0

    @property
    def carried_by(self) -> str:
        """The backend's name."""
        return self.collective.name

    # --- the model, spread --------------------------------------------------------------------------------------

    def build(
        self,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        call: TaskView,
    ) -> None:
        """Make the model, give every rank that of rank 0, cut it, then make the optimizer of what is left.

        Raises:
            CheckpointError: the ranks made different models.
            ConfigError: the model cannot be cut as the mesh says.
        """
        mesh, world = self.mesh, self.collective.world
        is_cut = world.size > 1 and any(
            getattr(mesh, dimension) != 1 for dimension in DIMENSIONS if dimension != "data"
        )
        with parameters_in_files() if is_cut and world.device == "cpu" else nullcontext():
            self.model = self.net = model = make_model()
        check_model(mesh, model, call)
        self._plain = _on_meta(model)
        self._mixtures = bool(mixtures(model))
        self._stages = dict.fromkeys(model.state_dict(), 0)  # by name of a tensor, the stage that holds it
        if world.size > 1:
            named = [*model.named_parameters(), *model.named_buffers()]
            agree_on_tensors(self.collective, named)  # type: ignore[arg-type]
            with torch.no_grad():
                self.collective.broadcast([tensor for _, tensor in named])
            self._norms = synchronise_norms(model, self.collective, self.config.sync.sync_batch_norm)  # type: ignore[arg-type]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._cut(model, call)
        in_memory(model)
        if call.optimizer is not None:
            _move(call.optimizer, names, model)
        self.optimizer = make_optimizer(model)
        self._number_parameters()
        self._take_parts()
        self._averages = self._averages_over_copies()
        self._shares_buffers = BufferSharing(model, self.collective)  # type: ignore[arg-type]
        self.optimizer.zero_grad(set_to_none=True)

    def _cut(self, model: torch.nn.Module, call: TaskView) -> None:
        mesh = self.mesh
        blocks = blocks_of(model)
        plan = tensor_plan.find_plan(model, mesh.tensor, mesh.plan) if mesh.tensor not in (1, None) else {}
        if mesh.pipeline != 1:
            stage = self._stage(model, call, plan)
            stages.release(model, stage)
            # Parameters of the other stages are meta tensors now.
            plan = {
                name: split_kind
                for name, split_kind in plan.items()
                if all(parameter.device.type != "meta" for parameter in model.get_submodule(name).parameters())
            }
            # Blocks of the user's are not called as such any more: what the stage calls is gathered one by one.
            called = {node.target for node in stage.training.module.graph.nodes if node.op == "call_module"}
            blocks = [
                model.get_submodule(name)
                for name in sorted(called)
                if any(parameter.device.type != "meta" for parameter in model.get_submodule(name).parameters())
            ]
            self._pipeline = Pipeline(
                stage,
                self._group(("pipeline",)),
                torch.device(self.collective.world.device),
                micro_batches=mesh.parts_of_a_batch,
                schedule=mesh.schedule,
                data_size=self.data_size,
                exchanges_in_backward=mesh.shard != 1 or mesh.expert != 1,
                readers=self._group(READERS) if self.data_size > 1 and self._passes_are_collective else None,
            )
        if mesh.expert != 1:
            expert.split(model, self._devices["expert"])
        if self._mixtures and self.data_size > 1:
            share_tokens(model, GroupTokens(self._group(READERS)))
        if mesh.tensor != 1:
            tensor.split(model, self._dense["tensor"], plan)
        if mesh.activation_checkpointing:
            recompute(recomputable(blocks or [model]))
        if mesh.shard != 1:
            over = tuple(dimension for dimension in ("data", "shard") if getattr(mesh, dimension) != 1)
            self._messages = shard(
                None if self._pipeline is not None else model,
                blocks,
                self._dense[over],
                keep_parameters=mesh.keep_parameters,
                offload=mesh.offload,
                expert_mesh=self._devices[over] if mesh.expert != 1 else None,
            )

    def _stage(self, model: torch.nn.Module, call: TaskView, plan: Mapping[str, str]) -> stages.Stage:
        """Cut the model as rank 0 says, and return this rank's stage.

        Rank 0 takes the cuts that are named, else those of an earlier attempt of the run, else it measures.
        """
        mesh, called = self.mesh, {"inputs": call.inputs, "input_style": call.input_style, "plan": plan}

        def cuts() -> tuple[str, ...]:
            if mesh.cuts is not None:
                return mesh.cuts
            earlier = call.earlier_cuts() if call.earlier_cuts is not None else None
            if earlier is not None and len(earlier) == int(mesh.pipeline or 1) - 1:
                return tuple(earlier)
            example = None
            if call.example is not None:
                first = call.example()
                rows = -(-len(next(iter(first.values()))) // mesh.parts_of_a_batch)
                example = {name: value[:rows] for name, value in first.items()}
            return stage_balance.measure(model, int(mesh.pipeline or 1), example=example, **called)  # type: ignore[arg-type]

        self.cuts = on_leader(self.collective, cuts)
        parts = stages.split(model, self.cuts, **called)  # type: ignore[arg-type]
        for part in parts:
            self._stages |= dict.fromkeys([*part.parameters, *part.buffers], part.index)
        return parts[self._place.pipeline]

    def _number_parameters(self) -> None:
        """Number the parameters as one plain optimizer does, and leave this rank's own in the groups."""
        groups = self.optimizer.param_groups
        self._group_sizes = [len(group["params"]) for group in groups]
        every = [parameter for group in groups for parameter in group["params"]]
        self._numbers = {parameter: number for number, parameter in enumerate(every)}
        self._parameters_by_number = every
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self._stage_of_number = [
            self._stages.get(names.get(parameter, ""), self._place.pipeline) for parameter in every
        ]
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.device.type != "meta"]
        for parameter in every:
            if parameter.device.type == "meta":
                self.optimizer.state.pop(parameter, None)  # Adagrad, for one, makes it at once

    def _take_parts(self) -> None:
        """Take a plain tensor for each DTensor, the part that this rank has; let the optimizer step it if it may.

        An operation on a DTensor takes some 30 us more than on a tensor, and a step of Adam makes twelve of them for
        each parameter. Other optimizers, which take norms of a parameter or multiply it, get the DTensors.
        """
        self._parameter_of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # by what this rank has of it
        self._steps_parts = type(self.optimizer) in _ELEMENTWISE
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                part = parameter
                if hasattr(parameter, "placements"):
                    part = torch.nn.Parameter(_local(parameter), parameter.requires_grad)
                    if self.mesh.shard == 1:  # else layers compute with what is gathered of it
                        tensor.keep_part(parameter, part)
                self._parameter_of[part] = parameter
                if part is parameter or not self._steps_parts:
                    continue
                group["params"][index] = part
                self._numbers[part] = self._numbers.pop(parameter)
                if parameter in self.optimizer.state:
                    state = self.optimizer.state.pop(parameter)
                    self.optimizer.state[part] = {
                        name: _local(value) if _is_tensor(value) else value for name, value in state.items()
                    }

    # --- the step -----------------------------------------------------------------------------------------------

    def step(self, batch: Any, objective: StepObjective, *, last: bool = True) -> tuple[torch.Tensor, Any]:
        """Forward and backward, in which shards and splits are exchanged, and with the last batch copies averaged."""
        outputs = None
        if last and batch.rows:  # gradients of rows that stand in for none are not to leave
            for average in self._averages:
                average.begin(self._pipeline.micro_batches if self._pipeline is not None else 1)
        with self._computing():
            if self._pipeline is not None:
                loss, outputs = self._pipeline.step(batch, objective)
                loss = loss * int(self.mesh.pipeline or 1)  # the other stages have none, and the mean is over all ranks
            elif batch.rows:
                loss, outputs = objective(self.net, batch)
                objective.scaled(loss).backward()  # type: ignore[no-untyped-call]
                loss = loss.detach()
            else:
                self._pass_without_rows(batch, objective)
                loss = torch.zeros((), device=self.collective.world.device)
        if self._messages is not None:
            self._messages.count(*(parameter.grad is not None for parameter in self._parameter_of.values()))
        if last:
            self.exchange()
        return loss, outputs

    def _computing(self) -> AbstractContextManager[None]:
        """A context for passes of the model."""
        return tensor.computing() if self.mesh.tensor != 1 else nullcontext()

    @property
    def _passes_are_collective(self) -> bool:
        """Whether ranks that read other rows wait for this one's passes."""
        return self.mesh.shard != 1 or self._mixtures or self._norms is not None

    def _pass_without_rows(self, batch: Any, objective: StepObjective) -> None:
        if not self._passes_are_collective:
            objective.skip(batch)
            return
        with self._standing_in():
            loss = objective.without_rows(self.net, batch)
            if loss.requires_grad:  # within, since recomputed activations are passes, too
                (objective.scaled(loss) * 0.0).backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        """Let forward passes inside be of rows that stand in for none."""
        with ExitStack() as contexts:
            if self._norms is not None:
                contexts.enter_context(self._norms.weighted(0.0))
            if self._mixtures:
                contexts.enter_context(stand_in(self.model))
            yield

    def exchange(self, weight: float | None = None) -> None:
        """Average the gradients over the copies of each parameter that read other rows; ``fully_shard`` did its own.

        Where the optimizer steps parts, they have the gradients then, and the model's own parameters have none.
        """
        self._check_messages()
        for average in self._averages:
            average.finish()
        for part, parameter in self._parameter_of.items():
            if part is parameter:
                continue
            if parameter.grad is not None:  # of no copies
                part.grad, parameter.grad = _local(parameter.grad), None
            if self.mesh.offload:
                part.data = _local(parameter)  # what waits in the host's memory may have moved
            if not self._steps_parts and part.grad is not None:
                parameter.grad, part.grad = _laid_out(part.grad, parameter), None

    def _check_messages(self) -> None:
        """Refuse layers that computed on some readers alone: theirs were added to those of others."""
        if self._messages is None:
            return
        groups = [self._dense[dimension].get_group() for dimension in ("shard", "data")]
        if self._messages.differ(group for group in groups if group.size() > 1):
            raise ConfigError(
                f"a layer computed on some ranks alone, or in another order, which strategy='{self.text}' cannot "
                "train: let each batch go through the same layers, or choose strategy='all_reduce' or 'zero1'"
            )

    def check_parameters(self) -> None:
        """Refuse ``parameter.data = ...``, too: torch leaves a DTensor the part that it had, and says nothing."""
        super().check_parameters()
        storages = {parameter: parameter.untyped_storage() for parameter in self._parameter_of.values()}
        earlier, self._storages = self._storages or storages, storages
        for parameter, storage in storages.items():
            if storage is not earlier[parameter] and hasattr(parameter, "placements") and not self.mesh.offload:
                names = {parameter: name for name, parameter in self.model.named_parameters()}
                raise ConfigError(
                    f"parameter {names[parameter]!r} was given other data while the model trained, and "
                    f"strategy='{self.text}' spreads what it had: write into it, by parameter.mul_(...) under "
                    "torch.no_grad() and the like"
                )

    def _averages_over_copies(self) -> list[CopiesAverage]:
        """What averages the parameters that lie on several ranks which read other rows."""
        if self.mesh.shard != 1:
            return []
        copies: dict[tuple[str, ...], dict[torch.nn.Parameter, torch.nn.Parameter]] = {("data",): self._parameter_of}
        if self.mesh.expert != 1:
            dealt = {p for layer in mixtures(self.model).values() for p in layer.expert_parameters().values()}
            copies = {
                ("data",): {part: p for part, p in self._parameter_of.items() if p in dealt},
                ("data", "expert"): {part: p for part, p in self._parameter_of.items() if p not in dealt},
            }
        return [
            CopiesAverage(copied, self._group(dimensions), self.collective.guard)  # type: ignore[attr-defined]
            for dimensions, copied in copies.items()
            if _product(self.mesh, dimensions) > 1
        ]

    def _group(self, dimensions: tuple[str, ...]) -> Any:
        """The process group of the ranks that differ from this one in ``dimensions`` alone; all ranks ask in turn."""
        if dimensions not in self._groups:
            if len(dimensions) == 1:
                self._groups[dimensions] = self._devices[dimensions[0]].get_group()
            else:
                from torch.distributed import new_subgroups_by_enumeration

                axes = [DIMENSIONS.index(dimension) for dimension in dimensions]
                other_axes = [axis for axis in range(len(DIMENSIONS)) if axis not in axes]
                ranks = self._devices.mesh.permute(*other_axes, *axes).reshape(-1, _product(self.mesh, dimensions))
                self._groups[dimensions], _ = new_subgroups_by_enumeration(ranks.tolist())  # type: ignore[no-untyped-call]
        return self._groups[dimensions]

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm of the whole gradient: each part of it counts once, wherever it lies and how often."""
        ranks_of_a_stage = self.collective.world.size // self.mesh.sizes()[0]
        squares = torch.zeros((), dtype=torch.float64, device=self.collective.world.device)
        gradients = []
        for parameter in self.parameters():
            if parameter.grad is not None:
                gradients.append(_local(parameter.grad))
                copies = ranks_of_a_stage / _part_count(self._parameter_of.get(parameter, parameter))
                squares += torch.linalg.vector_norm(gradients[-1]).double().square() / copies
        norm = self.collective.all_reduce(squares, "sum").sqrt() if self.collective.world.size > 1 else squares.sqrt()
        if gradients:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for dtype in {gradient.dtype for gradient in gradients}:
                scaled = [gradient for gradient in gradients if gradient.dtype == dtype]
                torch._foreach_mul_(scaled, factor.to(scaled[0]))  # which lie on the host where they are offloaded
        return norm

    def evaluate(self, batch: Any, objective: StepObjective) -> tuple[Any, torch.Tensor] | None:
        """Evaluate as ``Strategy.evaluate`` does; a rank without rows takes part in what others gather."""
        if self._pipeline is not None:
            with self._computing():
                return self._pipeline.evaluate(batch, objective)
        if batch.rows:
            with self._computing():
                return objective.evaluate(self.model, batch)
        if self.mesh.shard != 1 or self.mesh.expert != 1:
            with self._standing_in(), self._computing():
                objective.forward_without_rows(self.model, batch)
        return None

    def end_evaluation(self) -> None:
        """Let go of what ``keep_parameters`` left gathered: callbacks that freeze or thaw a layer mean the parts."""
        self._check_messages()
        if self.mesh.keep_parameters:
            ungather(self.model)

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers; those of a stage, of its first rank."""
        if self._pipeline is None:
            self._shares_buffers()
            return
        import torch.distributed as dist

        buffers_of_stage = [buffer for buffer in self.model.buffers() if buffer.device.type != "meta"]
        if _product(self.mesh, DIMENSIONS[1:]) > 1:
            for buffer in buffers_of_stage:
                dist.broadcast(buffer, self._leaders[self._place.pipeline], group=self._group(DIMENSIONS[1:]))

    def plain_state(self) -> Mapping[str, Any]:
        """The state of the model before it was cut, without memory."""
        return self._plain.state_dict()

    # --- the state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Gather tensor by tensor: other ranks than the leader hold one whole tensor at a time."""
        model = dict(self._gathered_model())
        optimizer = self._gathered_optimizer()
        if not self.collective.world.is_leader:
            return None
        return {"model": model, "optimizer": optimizer, "sync": {}}

    def _gathered_model(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor of the whole model's state, copied to the CPU; on the leader alone."""
        parts = self.model.state_dict(keep_vars=True)
        for name, meta in self._plain.state_dict().items():
            full = self._gather(parts[name], self._stages[name])
            if self.collective.world.is_leader:
                yield name, in_file(full).reshape(meta.shape)

    def _gather(self, part: Any, stage: int) -> Any:
        """Return the whole of what each rank of ``stage`` has a part of, at the ranks of the stage and the leader."""
        full = _full(part) if stage == self._place.pipeline else None
        root = self._leaders[stage]
        if root == 0:
            return full
        sent = _on_cpu(full) if self.collective.world.rank == root else None
        return self.collective.broadcast_object(sent, root)

    def _gathered_optimizer(self) -> dict[str, Any] | None:
        stepped = {number: part for part, number in self._numbers.items()}
        shapes = self._shapes()
        states: dict[int, Any] = {}
        for number, stage in enumerate(self._stage_of_number):
            part = stepped[number]
            state = self.optimizer.state.get(part)
            if state and self._steps_parts:
                parameter = self._parameter_of[part]
                state = {
                    name: _laid_out(value, parameter) if getattr(value, "shape", None) == part.shape else value
                    for name, value in state.items()
                }
            state = self._gather(state or None, stage)
            if state is not None and self.collective.world.is_leader:
                states[number] = {name: _in_file(value, shapes[number]) for name, value in state.items()}
        if not self.collective.world.is_leader:
            return None
        numbers = iter(range(len(self._stage_of_number)))
        groups = [
            group | {"params": list(itertools.islice(numbers, size))}
            for group, size in zip(self.optimizer.param_groups, self._group_sizes, strict=True)
        ]
        return {"state": states, "param_groups": groups}

    def _shapes(self) -> list[torch.Size | None]:
        """The shape of each parameter in the plain model, by its number; None where it has no name there."""
        plain = dict(self._plain.named_parameters())
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [plain[names[p]].shape if names.get(p) in plain else None for p in self._parameters_by_number]

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Give every rank its part of the leader's ``state``, one tensor at a time."""

        def names() -> tuple[bool, list[str]]:
            assert state is not None
            with fitting("model"):
                # A copy without memory: names and shapes are checked, and no tensor is copied.
                copy.deepcopy(self._plain).load_state_dict(state["model"], assign=True)
            return "optimizer" in state, list(self._plain.state_dict())

        has_optimizer, tensors = on_leader(self.collective, names)
        parts = self.model.state_dict(keep_vars=True)
        plain = self._plain.state_dict()
        with torch.no_grad():
            for name in tensors:
                full = torch.empty_like(plain[name], device=self.collective.world.device)
                if state is not None:
                    full.copy_(state["model"][name])
                self.collective.broadcast([full])
                if parts[name].device.type != "meta":
                    _local(parts[name]).copy_(_local(_part_of(full, parts[name])))
        if has_optimizer:
            self._load_optimizer(state["optimizer"] if state is not None else None)

    def _load_optimizer(self, state: dict[str, Any] | None) -> None:
        def groups_of_state() -> list[dict[str, Any]]:
            assert state is not None
            with fitting("optimizer"):
                sizes = [len(group["params"]) for group in state["param_groups"]]
                if sizes != self._group_sizes:
                    raise ValueError(f"groups of {sizes} parameters for groups of {self._group_sizes}")
            return [dict(group) for group in state["param_groups"]]

        groups = on_leader(self.collective, groups_of_state)
        stepped = {self._numbers[part]: part for part in self.parameters()}
        shapes, states = self._shapes(), {}
        for number in range(len(self._stage_of_number)):
            full = self.collective.broadcast_object(state["state"].get(number) if state is not None else None)
            if full is not None and number in stepped:
                parameter = self._parameter_of.get(stepped[number], stepped[number])
                states[number] = {
                    name: _part_of(value, parameter) if getattr(value, "shape", None) == shapes[number] else value
                    for name, value in full.items()
                }
                if self._steps_parts:
                    states[number] = {
                        name: _local(value) if _is_tensor(value) else value for name, value in states[number].items()
                    }
        # torch numbers the parameters of a state by their position among those that an optimizer has.
        positions = {self._numbers[part]: position for position, part in enumerate(self.parameters())}
        for group, own_group in zip(groups, self.optimizer.param_groups, strict=True):
            group["params"] = [positions[self._numbers[part]] for part in own_group["params"]]
        states = {positions[number]: state_of_part for number, state_of_part in states.items()}
        with fitting("optimizer"):
            self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def gather_model(self) -> torch.nn.Module:
        """Return the plain model on the leader; elsewhere the model as it is spread."""
        state = dict(self._gathered_model())
        if not self.collective.world.is_leader:
            return self.model
        plain = copy.deepcopy(self._plain)
        plain.load_state_dict(state, assign=True)
        return plain

    def close(self) -> None:
        """Take the hooks off the parameters, and give batch norm its own ``forward`` back."""
        for average in self._averages:
            average.close()
        if self._norms is not None:
            self._norms.undo()


def check_training(mesh: Mesh, config: TrainConfig, device: str | None) -> None:
    """Refuse settings that no mesh takes, or that this one does not; ``device`` is None where nobody knows it so far.

    Raises:
        ConfigError: names both.
    """
    if config.compile:
        raise ConfigError(f"strategy='{mesh}' and compile={config.compile!r} do not go together: drop one")
    if config.sync.compression is not None:
        raise ConfigError(
            f"strategy='{mesh}' sends more than gradients, and gradient_compression={config.sync.compression!r} is of "
            "these alone: drop one"
        )
    if config.precision == "fp16":
        raise ConfigError(
            f"strategy='{mesh}' leaves each rank a part of the gradients, and the scaler of precision='fp16' looks at "
            "all: choose precision='bf16'"
        )
    if mesh.offload and device is not None and torch.device(device).type == "cpu":
        raise ConfigError("offload=True moves parameters off a GPU, and the ranks compute on CPUs: drop it")


def check_model(mesh: Mesh, model: torch.nn.Module, call: TaskView) -> None:
    """Refuse a model that cannot be spread so; no other rank is asked, and the model is as it was.

    Raises:
        ConfigError: names the layer, and what to choose.
    """
    check_layers(mesh, model)
    if mesh.pipeline != 1:
        _check_stages(mesh, model, call)


def check_layers(mesh: Mesh, model: torch.nn.Module) -> None:
    """Refuse layers that cannot be spread so, whatever the model is called with.

    Raises:
        ConfigError: names the layer, and what to choose.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"layer {name!r} gives sparse gradients, which strategy='{mesh}' does not spread: make it with "
                "sparse=False, or choose strategy='all_reduce'"
            )
        if mesh.tensor != 1 and isinstance(module, _NormBase):
            raise ConfigError(
                f"layer {name!r}, a {type(module).__name__}, counts the rows of all ranks, and those of a tensor group "
                "read the same: replace it (LayerNorm, GroupNorm), or choose 'all_reduce' or 'fsdp'"
            )
        if mesh.pipeline != 1 and isinstance(module, MixtureOfExperts):
            _check_mixture(mesh, name, module)
        elif mesh.pipeline != 1 and not callable(inspect.getattr_static(module, "auxiliary_loss", len)):
            raise ConfigError(
                f"layer {name!r}, a {type(module).__name__}, adds to the loss, which a pipeline computes on its last "
                "stage alone: choose a strategy without a pipeline"
            )
    if mesh.activation_checkpointing and not recomputable(blocks_of(model) or [model]):
        raise ConfigError(
            "activation_checkpointing=True computes a block twice, and all blocks of the model have running "
            "statistics, which would count a batch twice: drop that option, or take LayerNorm or GroupNorm"
        )
    if mesh.shard != 1:
        _check_dimensions(mesh, model)
    if mesh.shard != 1 and mesh.pipeline == 1:
        _check_dtypes(mesh, model)
    if mesh.pipeline != 1:
        stage_balance.check_rows_are_independent(model)
    if mesh.expert != 1:
        expert.check(model, _product(mesh, ("shard", "expert")))
    if mesh.tensor != 1:
        tensor_plan.find_plan(model, int(mesh.tensor or 1), mesh.plan)
    arguments = list(inspect.signature(model.forward).parameters.values())
    if mesh.pipeline != 1 and all(
        parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
        for parameter in arguments
    ):
        _check_stages(mesh, model, TaskView([parameter.name for parameter in arguments]))


def _check_dimensions(mesh: Mesh, model: torch.nn.Module) -> None:
    """Refuse parameters without a dimension, which ``fully_shard`` does not cut, frozen ones included.

    Raises:
        ConfigError: names one.
    """
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ConfigError(
                f"parameter {name!r} is a single number without a dimension, which strategy='{mesh}' cannot cut: make "
                "it of shape (1,), or choose strategy='all_reduce' or 'zero1'"
            )


def _check_dtypes(mesh: Mesh, model: torch.nn.Module) -> None:
    """Refuse trained parameters of several dtypes in what is gathered at once: their gradients travel as one tensor.

    Raises:
        ConfigError: names two of them.
    """
    blocks = {parameter: number for number, block in enumerate(blocks_of(model)) for parameter in block.parameters()}
    firsts: dict[int | None, tuple[str, torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first_name, first = firsts.setdefault(blocks.get(parameter), (name, parameter))
            if first.dtype != parameter.dtype:
                raise ConfigError(
                    f"{first_name!r} is of {first.dtype} and {name!r} of {parameter.dtype}, which strategy='{mesh}' "
                    "gathers at once: give both one dtype, or choose strategy='all_reduce' or 'zero1'"
                )


def _check_mixture(mesh: Mesh, name: str, layer: MixtureOfExperts) -> None:
    """Refuse what a mixture does with all tokens of a batch, where a pipeline computes some before it has the others.

    Raises:
        ConfigError: names the layer, and what to choose.
    """
    if mesh.parts_of_a_batch == 1:
        return
    if layer.capacity_factor is not None:
        raise ConfigError(
            f"layer {name!r} limits each expert by capacity_factor={layer.capacity_factor} of all tokens of a batch, "
            f"which a pipeline computes in {mesh.parts_of_a_batch} micro-batches: give it capacity_factor=None, or "
            "choose schedule='naive'"
        )
    if layer.balance_weight and mesh.schedule == "1f1b":
        raise ConfigError(
            f"layer {name!r} balances all tokens of a batch by balance_weight={layer.balance_weight}, and "
            "schedule='1f1b' goes back with some before it went forward with all: choose schedule='gpipe', or give it "
            "balance_weight=0"
        )


def _check_stages(mesh: Mesh, model: torch.nn.Module, call: TaskView) -> None:
    if call.by_user:
        raise ConfigError(
            f"strategy='{mesh}' calls the parts of the model itself, and a function of yours calls it as a whole "
            "(forward= or train_step= of the task): drop one"
        )
    plan = tensor_plan.find_plan(model, mesh.tensor, mesh.plan) if mesh.tensor not in (1, None) else {}
    called: dict[str, Any] = {"inputs": call.inputs, "input_style": call.input_style, "plan": plan}
    cuts = mesh.cuts or stage_balance.measure(model, int(mesh.pipeline or 1), **called)
    parts = stages.split(model, cuts, **called)
    if len(parts) != mesh.pipeline:
        raise ConfigError(
            f"{len(cuts)} cuts make {len(parts)} stages, and the mesh has pipeline={mesh.pipeline}: name "
            f"{int(mesh.pipeline or 1) - 1}"
        )


def _move(optimizer: torch.optim.Optimizer, names: Mapping[int, str], model: torch.nn.Module) -> None:
    """Let an optimizer of the whole model step its parts.

    Args:
        optimizer: made of the parameters that ``model`` had before it was cut.
        names: theirs, by ``id``; the optimizer has kept them alive.
        model: cut.
    """
    parts = dict(model.named_parameters())
    states = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        uncut = group["params"]
        group["params"] = [parts.get(names.get(id(parameter), ""), parameter) for parameter in uncut]
        for parameter, part in zip(uncut, group["params"], strict=True):
            if parameter in states and part.device.type != "meta":
                optimizer.state[part] = {
                    name: _part_of(value, part) if getattr(value, "shape", None) == parameter.shape else value
                    for name, value in states[parameter].items()
                }


def _on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of ``model`` whose tensors have shapes and no memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _full(part: Any) -> Any:
    """The whole of a tensor that ranks have parts of; of the values of a dict likewise."""
    if isinstance(part, dict):
        return {name: _full(value) for name, value in part.items()}
    return part.full_tensor().detach() if hasattr(part, "full_tensor") else part.detach() if _is_tensor(part) else part


def _on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on_cpu(entry) for name, entry in value.items()}
    return value.cpu() if _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _in_file(value: Any, shape: torch.Size | None) -> Any:
    """A copy of what belongs to a parameter of ``shape``, on the CPU."""
    if not _is_tensor(value):
        return value
    if shape is not None and value.numel() == shape.numel() and value.ndim:
        value = value.reshape(shape)
    return in_file(value)


def _part_of(full: torch.Tensor, parameter: Any) -> Any:
    """This rank's part of ``full``, laid out as ``parameter`` is; nothing travels."""
    if not hasattr(parameter, "placements"):
        return full.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    local = full.to(parameter.device).reshape(parameter.shape)
    return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _local(tensor: Any) -> torch.Tensor:
    """This rank's memory of ``tensor``, without a copy."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach() if local.requires_grad else local


def _laid_out(part: torch.Tensor, parameter: Any) -> torch.Tensor:
    """This rank's ``part`` of what is laid out as ``parameter`` is."""
    if not hasattr(parameter, "placements") or not part.ndim:
        return part
    from torch.distributed.tensor import DTensor

    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    tensor: torch.Tensor = DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, **layout
    )
    return tensor


def _part_count(parameter: Any) -> int:
    """The number of parts that a parameter is cut into."""
    mesh_shape = tuple(parameter.device_mesh.shape) if hasattr(parameter, "device_mesh") else ()
    parts = 1
    for placement, size in zip(getattr(parameter, "placements", ()), mesh_shape, strict=True):
        parts *= 1 if placement.is_replicate() else size
    return parts


def _product(mesh: Mesh, dimensions: tuple[str, ...]) -> int:
    size = 1
    for dimension in dimensions:
        size *= int(getattr(mesh, dimension))
    return size
