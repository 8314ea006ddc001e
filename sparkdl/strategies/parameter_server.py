"""Parameters on servers: every rank is a worker that pushes gradients and pulls parameters."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from sparkdl import observe
from sparkdl.collective.agree import named_parameters, share_optimizer
from sparkdl.collective.backends.solo import LocalGradients
from sparkdl.collective.base import Collective, on_leader
from sparkdl.collective.signed import secret_of_run
from sparkdl.config import TrainConfig
from sparkdl.errors import CheckpointError, ConfigError, UnreachableError
from sparkdl.launch.addresses import meeting_address, own_address_to
from sparkdl.launch.store import store_of_this_run
from sparkdl.launch.wire import Listener, WireError
from sparkdl.nn.mixture import mixtures
from sparkdl.strategies.all_reduce import fitting
from sparkdl.strategies.base import Strategy, TaskView
from sparkdl.strategies.file_tensors import in_file, in_memory, parameters_in_files
from sparkdl.strategies.local_sgd import check_local_training
from sparkdl.strategies.served_collective import ServedCollective
from sparkdl.strategies.served_embedding import ServedEmbedding, tables_of
from sparkdl.strategies.server import DirectLink, Held, Link, Message, Server, WireLink, Workers, host
from sparkdl.strategies.server_options import ServerOptions
from sparkdl.world import World

_WORDS_IN_CACHE = 1 << 15  # 256 KiB at a time
_PIECE_BYTES = 8 << 20  # of a table, at a time: it need not fit a rank
_LEAVE_SECONDS = 20.0
_RESTORE_SECONDS = 45.0  # a host that has vanished is noticed within 30 s


@dataclass(frozen=True, slots=True)
class _Part:
    """What one server holds of one parameter: all of it, or of a table every row whose number leaves ``server``.

    Attributes:
        number: of the parameter, counted through the groups of the optimizer.
        group: of the optimizer.
        is_table: whether it is a part of a table.
    """

    number: int
    group: int
    is_table: bool


class ParameterServer(Strategy):
    """Pushes the gradients of its rows to the servers, and pulls the parameters from them.

    Servers are threads in the first ranks (``server.py``), beside the workers: whoever starts ranks starts servers, and
    the driver, which may be far away, carries no gradients. A step, seen from a worker:

        forward, backward -> push: to each server the gradients of its parts -> pull: wait as long as ``staleness`` says

    After Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014).

    With ``staleness=0`` the weights are those of ``AllReduce``, and so is what is saved. Otherwise the bound is what is
    guaranteed: no worker begins a step while it is more than ``staleness`` pushes ahead of the slowest. All workers
    meet in any case where the trainer looks at the losses of all (``window_steps``), at checkpoints and at the end of
    an epoch, where all take over what the servers have; that is what is saved, whole, so that any strategy goes on from
    it, though not to the same weights. A worker then clips its own gradient before it pushes.

    An ``nn.Embedding`` of 64 KiB or more, whose weight nothing else uses, lies on the servers alone, row i on
    server i modulo their number: a forward pass fetches the rows of its batch, and their gradients alone are pushed.
    With ``sparse=False`` the server steps the whole table, as an optimizer of dense gradients does.

    A rank that is gone ends the run, as with any strategy, unless ``tolerant``: then it is left out, gradients are
    averaged over the others, which say so once and train without its rows. A server that went with its rank comes back
    on rank 0 as the newest checkpoint of this run has it; what was pushed to it since is lost, and told. Without a
    checkpoint, or where rank 0 is gone, the run ends all the same.

    Batch norm takes each rank's own rows; its statistics are those of rank 0.

    Raises:
        ConfigError: a setting has nothing to act on.
    """

    def __init__(self, collective: Collective, config: TrainConfig, options: ServerOptions) -> None:
        check_local_training(options, config)
        self.options = options.filled(collective.world.size)
        self.steps_together = options.staleness == 0
        self._ranks, self._served = collective, ServedCollective(collective)
        super().__init__(self._served, config)
        self._order = [server for server in range(options.servers) if server != self.data_rank]  # its own answers last
        self._order += [self.data_rank] if self.data_rank < options.servers else []
        self._server: Server | None = None  # that of this rank
        self._links: list[Link] = []
        self._listeners: list[Listener] = []
        self._clock = self._exchanges = 0
        self._factor = 1.0
        self._pushed: list[Message] | None = None  # what servers have got of a step that is not through
        self._sums: list[int] = []  # of the bits of each parameter as it was pulled
        self._tables: dict[int, ServedEmbedding] = {}
        self._snapshots: dict[int, tuple[int, list[Any]]] = {}
        self._restored: dict[int, tuple[Server, Listener]] = {}
        self._restoring = threading.Lock()
        self._is_closed = self._is_through = False

    def build(
        self,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        call: TaskView,
    ) -> None:
        """Make both, leave the parts of this rank's server to it, and connect to all servers.

        Raises:
            CheckpointError: the ranks made different models.
            ConfigError: the model does not go with servers.
        """
        world, ranks = self._ranks.world, self._ranks
        with parameters_in_files() if world.device == "cpu" else nullcontext():
            self.model = make_model()
        check_served_model(self.options, self.config, self.model, world.size)
        self._own = make_optimizer(self.model)
        names = named_parameters(self.model, self._own)
        numbered = [parameter for group in self._own.param_groups for parameter in group["params"]]
        number_of = {parameter: number for number, parameter in enumerate(numbered)}
        tables = {number_of[weight]: module for weight, module in tables_of(self.model, set(numbered)).items()}
        if world.size > 1:
            weights = {numbered[number] for number in tables}
            shapes = ranks.all_gather_object({names[weight]: tuple(weight.shape) for weight in weights})
            for rank, rank_shapes in enumerate(shapes):
                if rank_shapes != shapes[0]:
                    raise CheckpointError(
                        f"rank 0 has the embeddings {shapes[0]} and rank {rank} {rank_shapes}: build the same "
                        "model on each"
                    )
            with torch.no_grad():
                ranks.broadcast([*(p for p in names if p not in weights), *self.model.buffers()])
            share_optimizer(ranks, self._own)  # type: ignore[arg-type]

        # Which server holds what, and the one of this rank.
        groups = [number for number, group in enumerate(self._own.param_groups) for _ in group["params"]]
        self._parts = [
            [_Part(number, groups[number], number in tables) for number in numbers]
            for numbers in balanced([parameter.nbytes for parameter in numbered], set(tables), self.options.servers)
        ]
        self._places: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(numbered))}
        for server, parts in enumerate(self._parts):
            for index, part in enumerate(parts):
                self._places[part.number].append((server, index))
        self._workers = Workers(world.size, self.options.tolerant, self._tell_gone if world.is_leader else None)
        if world.rank < self.options.servers:
            cut = [
                self._cut(world.rank, part, parameter, self._own.state.get(parameter, {}))
                for part in self._parts[world.rank]
                for parameter in [numbered[part.number]]
            ]
            self._server = self._made_server(world.rank, self._own.param_groups, cut)
            if world.is_leader:
                self._server.restore = self._restore

        # The worker: a table becomes a module that asks for rows, the optimizer one that pushes and pulls.
        for number, plain in tables.items():
            self._tables[number] = ServedEmbedding(plain, names[numbered[number]], partial(self._rows, number))
        served = {plain: self._tables[number] for number, plain in tables.items()}
        for module in list(self.model.modules()):
            for name, child in list(module._modules.items()):
                if child in served:
                    setattr(module, name, served[child])
        in_memory(self.model)
        self._numbered = [
            self._tables[number].placeholder if number in tables else parameter
            for number, parameter in enumerate(numbered)
        ]
        self._names: dict[int, list[str]] = {number: [] for number in range(len(numbered))}
        number_of = {parameter: number for number, parameter in enumerate(self._numbered)}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter in number_of:
                self._names[number_of[parameter]].append(name)
        remaining = iter(self._numbered)
        self.optimizer = _RemoteOptimizer(
            [{**group, "params": [next(remaining) for _ in group["params"]]} for group in self._own.param_groups],
            self._own.defaults,
            self._update,
        )
        self._own.state, self._own.param_groups = defaultdict(dict), []
        self.gradients = LocalGradients(self.model, self.optimizer, str(self.options))
        mode = self.config.compile
        self.net = torch.compile(self.model, mode=None if mode is True else mode) if mode else self.model
        for table in self._tables.values() if mode else ():  # what it asks a server is no part of a graph
            table.forward = torch.compiler.disable(table.forward)  # type: ignore[method-assign, no-untyped-call]
        self.optimizer.zero_grad(set_to_none=True)
        self._sums = self._sums_of_bits()
        self._connect()

    def _made_server(
        self,
        number: int,
        options: Sequence[Mapping[str, Any]],
        cut: Sequence[tuple[torch.Tensor, Mapping[str, Any]]],
        clocks: Sequence[int] | None = None,
    ) -> Server:
        """The server ``number`` of what ``cut`` has for each of its parts: values, and the optimizer's state."""
        parts = [
            Held(torch.nn.Parameter(value), part.group, part.is_table)
            for part, (value, _) in zip(self._parts[number], cut, strict=True)
        ]
        # The user's own optimizer, with whatever it keeps beside its groups, over these parameters.
        optimizer = object.__new__(type(self._own))
        optimizer.__dict__.update(self._own.__dict__)
        optimizer.param_groups = [
            {**options[group], "params": [part.parameter for part in parts if part.group == group]}
            for group in sorted({part.group for part in parts})
        ]
        states = ((part.parameter, state) for part, (_, state) in zip(parts, cut, strict=True))
        optimizer.state = defaultdict(dict, {parameter: dict(state) for parameter, state in states if state})
        seconds = getattr(self._ranks, "timeout_seconds", 300.0)
        return Server(parts, optimizer, self._workers, self.options.staleness, seconds, clocks)

    def _cut(
        self,
        server: int,
        part: _Part,
        tensor: torch.Tensor,
        state: Mapping[str, Any],
        rows: tuple[int, int] | None = None,
        *,
        copies: bool = True,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """A server's part of a parameter and of its state, or of a table some rows of that part."""

        def cut(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if part.is_table and value.shape == tensor.shape:
                value = value[server :: self.options.servers]
                value = value[slice(*rows)] if rows else value
            return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) if copies else value

        return cut(tensor), {name: cut(value) for name, value in state.items()}

    def _connect(self) -> None:
        world = self._ranks.world
        self._secret = secret_of_run(world, "parameter servers")
        addresses: list[Any] = [None]
        if world.size > 1:
            self._address = _address_of_this_rank(world)
            if self._server is not None:
                self._listeners.append(host(self._server, self._address, self._secret))
            addresses = self._ranks.all_gather_object(self._listeners[0].address if self._listeners else None)
            self._ranks.at_close(self._leave)  # type: ignore[attr-defined]
        for number in range(self.options.servers):
            if number == world.rank:
                assert self._server is not None
                self._links.append(DirectLink(self._server, world.rank))
            else:
                self._links.append(WireLink(addresses[number], self._secret, world.rank))
        self._ranks.barrier()
        self._served.serve(self._gathered)

    # --- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the mean of the gradients, which the servers have, or with staleness this worker's own."""
        if self.options.staleness != 0:
            return super().clip(max_norm)
        self._push()
        request = Message({"op": "norm", "clock": self._clock})
        answers = self._ask(dict.fromkeys(range(self.options.servers), request))
        norm = sum(float(answer.message["square"]) for answer in answers.values()) ** 0.5
        self._factor = min(max_norm / (norm + 1e-6), 1.0)
        return torch.tensor(norm, dtype=torch.float64)

    @torch.no_grad()
    def _update(self) -> None:
        """Push the gradients, unless ``clip`` did, and pull the parameters of the next step."""
        if self._pushed is None:
            self._push()
        self._pull(self._factor)
        self._pushed, self._factor = None, 1.0

    def check_parameters(self) -> None:
        """Refuse other values than the servers have, too: the next pull would overwrite them."""
        super().check_parameters()
        self._check_values()

    def _check_values(self) -> None:
        for number, (pulled, current) in enumerate(zip(self._sums, self._sums_of_bits(), strict=True)):
            if pulled != current:
                raise ConfigError(
                    f"parameter {self._names[number][0]!r} was written into on a worker, by a callback or by the model "
                    f"itself, and strategy='{self.text}' overwrites it by what its servers have: choose "
                    "strategy='all_reduce'"
                )

    def _sums_of_bits(self) -> list[int]:
        """The sum of the bits of each parameter, by its number; of a table, which lies on servers alone, 0."""
        return [
            0 if number in self._tables else sum_of_bits(parameter) for number, parameter in enumerate(self._numbered)
        ]

    def _push(self) -> None:
        self._check_values()
        self._clock += 1
        groups = [_options(group) for group in self.optimizer.param_groups]
        gradients = [None if parameter.grad is None else parameter.grad.cpu() for parameter in self._numbered]
        gradients = [g.coalesce() if g is not None and g.is_sparse else g for g in gradients]
        self._pushed = []
        for server, parts in enumerate(self._parts):
            dense: dict[int, torch.Tensor] = {}
            rows: dict[int, tuple[bool, torch.Tensor, torch.Tensor]] = {}
            for index, part in enumerate(parts):
                gradient = gradients[part.number]
                if gradient is None:
                    continue
                if not gradient.is_sparse:
                    dense[index] = gradient
                elif not part.is_table:
                    rows[index] = True, gradient.indices()[0], gradient.values()
                else:
                    numbers = gradient.indices()[0]
                    on_server = numbers % self.options.servers == server
                    keeps = self._tables[part.number].sparse
                    rows[index] = keeps, numbers[on_server] // self.options.servers, gradient.values()[on_server]
            message = {
                "op": "push",
                "clock": self._clock,
                "groups": groups,
                "dense": list(dense),
                "rows": [(index, keeps) for index, (keeps, _, _) in rows.items()],
            }
            tensors = [*dense.values(), *(tensor for _, *pair in rows.values() for tensor in pair)]
            self._pushed.append(Message(message, tensors))
        self._ask(dict(enumerate(self._pushed)), answered=False)

    def _pull(self, factor: float = 1.0) -> None:
        request = Message({"op": "pull", "clock": self._clock, "factor": factor})
        answers = self._ask(dict.fromkeys(range(self.options.servers), request))
        for server, answer in answers.items():
            parts_in_full = [self._numbered[part.number] for part in self._parts[server] if not part.is_table]
            for parameter, value in zip(parts_in_full, answer.tensors, strict=True):
                parameter.detach().copy_(value)
        self._sums = self._sums_of_bits()

    def _rows(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Fetch rows of a table, each asked for once."""
        count, on_server = self.options.servers, rows.cpu()
        requests = {}
        for server, index in self._places[number]:
            rows_of_server = on_server[on_server % count == server] // count
            requests[server] = Message({"op": "rows", "part": index}, [rows_of_server])
        answers = self._ask(requests)
        values = answers[0].tensors[0].new_empty((len(rows), self._tables[number].embedding_dim))
        for server, answer in answers.items():
            values[on_server % count == server] = answer.tensors[0]
        return values.to(rows.device)

    def clocks(self) -> list[int]:
        """How often each worker has pushed, by what server 0 has got."""
        return list(self._ask({0: Message({"op": "clocks"})})[0].message["clocks"])

    # --- servers, and what becomes of those that are gone -------------------------------------------------------------

    def _ask(self, requests: Mapping[int, Message], *, answered: bool = True) -> dict[int, Message]:
        """Ask servers, all at once, and return their answers; one that is gone is asked where it came back."""
        answers: dict[int, Message] = {}
        lost: dict[int, BaseException] = {}
        for server in (server for server in self._order if server in requests):
            try:
                self._links[server].send(requests[server])
            except (OSError, WireError) as error:
                lost[server] = error
        for server in requests if answered else ():
            if server not in lost:
                try:
                    answers[server] = self._links[server].receive()
                except (OSError, WireError) as error:
                    lost[server] = error
        for server, cause in lost.items():
            self._reconnect(server, cause)
            if requests[server].message["op"] != "push":
                self._links[server].send(requests[server])
            if answered:
                answers[server] = self._links[server].receive()
        return answers

    def _reconnect(self, server: int, cause: BaseException) -> None:
        """Go to where ``server`` came back, with what it may not have got of this step."""
        if server == 0 or not self.options.tolerant:
            raise UnreachableError(
                f"rank {server} is gone, and parameter server {server} with it ({cause}): the run goes on from its "
                "last checkpoint"
            ) from cause
        address = self._ask({0: Message({"op": "restore", "server": server})})[0].message["address"]
        self._links[server].close(failed=True)
        if self._ranks.world.is_leader:
            self._links[server] = DirectLink(self._restored[server][0], self._ranks.world.rank)
        else:
            self._links[server] = WireLink(tuple(address), self._secret, self._ranks.world.rank)
        if self._pushed is not None:
            self._links[server].send(self._pushed[server])

    def _restore(self, server: int) -> tuple[str, int]:
        """Let ``server``, whose rank is gone, come back on the leader; return where it is."""
        with self._restoring:
            if server not in self._restored:
                with self._workers.changed:
                    is_gone = self._workers.changed.wait_for(
                        lambda: server not in self._workers.alive, _RESTORE_SECONDS
                    )
                if not is_gone:
                    raise UnreachableError(
                        f"a rank lost its connection to parameter server {server}, which lives: see the network between"
                    )
                if server not in self._snapshots:
                    raise UnreachableError(
                        f"parameter server {server} is gone with its rank, and no checkpoint was taken so far that it "
                        "could come back from: set checkpoint_every"
                    )
                clock, values = self._snapshots[server]
                assert self._server is not None
                cut = [(value.clone(), copy.deepcopy(state)) for value, state in values]
                restored_server = self._made_server(server, self.optimizer.param_groups, cut, self._server.clocks)
                listener = host(restored_server, self._address, self._secret)
                self._listeners.append(listener)
                self._restored[server] = restored_server, listener
                self._say(
                    f"parameter server {server} is gone with its rank, and comes back on rank 0 as it was when that "
                    f"had pushed {clock} times: what was pushed to it since, {self._clock - clock} times, is lost"
                )
            return self._restored[server][1].address

    def _tell_gone(self, worker: int, why: str) -> None:
        if self._is_closed:
            return
        averaging = ", averaging their own gradients," if self.options.staleness == 0 else ""
        self._say(
            f"rank {worker} is gone ({why}): the other {len(self._workers.alive)} go on{averaging} without the rows "
            "that it would have read"
        )

    def _say(self, message: str) -> None:
        observe.logger.warning(message)
        observe.emit("log", message=message)

    def _gathered(self, payload: torch.Tensor) -> dict[int, torch.Tensor]:
        self._exchanges += 1
        answer = self._ask({0: Message({"op": "gather", "number": self._exchanges}, [payload])})[0]
        return dict(zip(answer.message["workers"], answer.tensors, strict=True))

    def close(self) -> None:
        """Remember whether this rank failed; servers live until the collective is closed."""
        self._is_closed, self._is_through = True, sys.exc_info()[0] is None
        if hasattr(self, "gradients"):  # build() may have failed before
            self.gradients.close()

    def _leave(self) -> None:
        for link in self._links:
            link.close(failed=not self._is_through)
        if self._listeners and self._is_through:  # the others may be about to read their last answer
            with self._workers.changed:
                other_workers = self._workers.alive - {self._ranks.world.rank}
                self._workers.changed.wait_for(lambda: not other_workers & self._workers.alive, _LEAVE_SECONDS)
        for listener in self._listeners:
            listener.close()

    # --- state ------------------------------------------------------------------------------------------------------

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers."""
        buffers = list(self.model.buffers())
        if buffers and self._ranks.world.size > 1:
            with torch.no_grad():
                self.collective.broadcast(buffers)

    def end_epoch(self) -> None:
        """Give all ranks rank 0's buffers and, where they may be at different steps, what the servers have."""
        self.share_buffers()
        if self.options.staleness != 0:
            self._meet()

    def _meet(self) -> None:
        self.collective.barrier()  # all that was pushed was stepped: each push was followed by a pull
        with torch.no_grad():
            self._pull()
        self.collective.barrier()

    def state_dict(self) -> dict[str, Any] | None:
        """Fetch all parts, and the state that the servers' optimizers have of them, on the leader."""
        self.collective.barrier()
        state = None
        if self._ranks.world.is_leader:
            model: dict[str, Any] = dict(self.model.state_dict())
            states: dict[int, Any] = {}
            snapshots: dict[int, list[Any]] = defaultdict(list)
            for number in range(len(self._numbered)):
                value, own_state = self._fetched(number, snapshots)
                model |= dict.fromkeys(self._names[number], value)
                states |= {number: own_state} if own_state else {}
            self._snapshots = {server: (self._clock, values) for server, values in snapshots.items()}
            counted = iter(range(len(self._numbered)))
            groups = [
                {**group, "params": [next(counted) for _ in group["params"]]} for group in self.optimizer.param_groups
            ]
            state = {"model": model, "optimizer": {"state": states, "param_groups": groups}, "sync": {}}
        self.collective.barrier()
        return state

    def _fetched(
        self, number: int, snapshots: dict[int, list[Any]] | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """A whole parameter, a table in a file; the optimizer's state of it, too, if ``snapshots`` collects parts."""
        wholes: dict[str, Any] = {}
        for server, index, rows in self._pieces(number):
            request = {"op": "state", "part": index, "rows": rows, "optimizer": snapshots is not None}
            values, state = self._ask({server: Message(request)})[server].value
            for name, piece in {"": values, **state}.items():
                if rows is None or not isinstance(piece, torch.Tensor) or piece.shape != values.shape:
                    wholes[name] = _in_file(piece) if server and snapshots is not None else piece
                    continue
                if name not in wholes:
                    wholes[name] = in_file(piece.new_empty(()).expand(self._numbered[number].shape))
                wholes[name][server :: self.options.servers][slice(*rows)] = piece
        for server, index in self._places[number]:
            if snapshots is not None and server:
                value, state = self._cut(server, self._parts[server][index], wholes.get("", 0), wholes, copies=False)
                snapshots[server].append((value, {name: part for name, part in state.items() if name}))
        return wholes.pop(""), wholes

    def _pieces(self, number: int) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
        """The places of a parameter, in pieces that travel: server, number of the part, and some rows of a table."""
        parameter, shape = self._numbered[number], self._numbered[number].shape
        for server, index in self._places[number]:
            if number not in self._tables:
                yield server, index, None
                continue
            count = len(range(server, shape[0], self.options.servers))
            most = max(1, _PIECE_BYTES // (shape[1] * parameter.element_size()))
            for first in range(0, count, most):
                yield server, index, (first, min(first + most, count))

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Give each server its parts of the leader's state, and every rank what lies on no server."""

        def load() -> list[dict[str, Any]] | None:
            assert state is not None
            model, served = state["model"], {name for names in self._names.values() for name in names}
            with fitting("model"):
                own_state = self.model.state_dict()
                names = [name for name in {**own_state, **model} if name not in own_state or name not in model]
                names += [name for name in served if name in model and model[name].shape != own_state[name].shape]
                if names:
                    raise ValueError(f"{names[0]!r} is in one of them alone, or has another shape there")
                self.model.load_state_dict({k: v for k, v in model.items() if k not in served}, strict=False)
            optimizer = state.get("optimizer")
            with fitting("optimizer"):
                groups = None if optimizer is None else optimizer["param_groups"]
                if groups is not None:
                    saved_sizes, own_sizes = (
                        [len(group["params"]) for group in param_groups]
                        for param_groups in (groups, self.optimizer.param_groups)
                    )
                    if saved_sizes != own_sizes:
                        raise ValueError(f"groups of {saved_sizes} parameters for groups of {own_sizes}")
            for number in self._places:
                values = model[self._names[number][0]]
                entries = {} if optimizer is None else optimizer["state"].get(number, {})
                for server, index, rows in self._pieces(number):
                    part = self._cut(server, self._parts[server][index], values, entries, rows)
                    self._ask({server: Message({"op": "load", "part": index, "rows": rows}, value=part)})
            options = None if groups is None else [{**group, "params": []} for group in groups]
            self._ask(dict.fromkeys(range(self.options.servers), Message({"op": "loaded"}, value=options)))
            return options

        options = on_leader(self.collective, load)
        if options is not None:
            parameters = [group["params"] for group in self.optimizer.param_groups]
            self.optimizer.param_groups = [{**o, "params": p} for o, p in zip(options, parameters, strict=True)]
        served = set(self._numbered)
        with torch.no_grad():
            self.collective.broadcast([*(p for p in self.model.parameters() if p not in served), *self.model.buffers()])
        self._meet()

    def gather_model(self) -> torch.nn.Module:
        """Return the model, on the leader with the tables that lie on servers; elsewhere it asks for their rows."""
        if not self._tables:
            return self.model
        self.collective.barrier()
        model = self.model
        if self._ranks.world.is_leader:
            plain = {id(table): table.plain(self._fetched(number)[0]) for number, table in self._tables.items()}
            model = copy.deepcopy(self.model, plain)
        self.collective.barrier()
        return model


class _RemoteOptimizer(torch.optim.Optimizer):
    """Has the groups of the user's own optimizer, whose options the servers take over at each step."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], update: Callable[[], None]) -> None:
        super().__init__(groups, defaults)
        self._update = update

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Push gradients and pull parameters."""
        self._update()


@torch.no_grad()
def sum_of_bits(tensor: torch.Tensor) -> int:
    """Add up what a tensor holds, eight bytes at a time: 14 ms for 100 MB, where four at a time took 111.

    The halves of each eight are mixed: the signs of an even number of float64 would cancel out.
    """
    data = tensor.detach().reshape(-1).view(torch.uint8)
    rest = data[len(data) // 8 * 8 :]
    words = data[: len(data) - len(rest)].view(torch.int64)
    in_cache = torch.split(words, _WORDS_IN_CACHE)
    return sum(int((part ^ (part >> 32)).sum()) for part in in_cache) + int(rest.sum())


def balanced(sizes: Sequence[int], tables: set[int], servers: int) -> list[list[int]]:
    """Deal parameters out to servers such that these hold about equally many bytes.

    Args:
        sizes: bytes of each parameter.
        tables: those of which every server gets a part.
        servers: how many.

    Returns:
        The numbers of the parameters that each server has, in order.
    """
    numbers_by_server: list[list[int]] = [sorted(tables) for _ in range(servers)]
    loads = [0] * servers
    for number in sorted(set(range(len(sizes))) - tables, key=lambda number: -sizes[number]):  # the largest first
        least = loads.index(min(loads))
        numbers_by_server[least].append(number)
        loads[least] += sizes[number]
    return [sorted(numbers) for numbers in numbers_by_server]


def check_served_model(options: ServerOptions, config: TrainConfig, model: torch.nn.Module, ranks: int) -> None:
    """Refuse a model whose layers several ranks must compute together.

    Raises:
        ConfigError: names the layer and what to choose.
    """
    if ranks == 1:
        return
    for name, module in model.named_modules():
        has_statistics = isinstance(module, _BatchNorm) or (
            isinstance(module, _NormBase) and module.track_running_stats
        )
        if has_statistics and config.sync.sync_batch_norm is None:
            raise ConfigError(
                f"{name!r} of the model is a {type(module).__name__}, whose statistics strategy='{options}' does not "
                "take over all ranks: set sync_batch_norm=False for those of each rank's rows, or choose all_reduce"
            )
    if mixtures(model):
        raise ConfigError(
            f"strategy='{options}' lets each rank compute by itself, and the experts of a MixtureOfExperts share the "
            "tokens of all: choose strategy='all_reduce' or 'expert'"
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a server is told of a group: numbers, texts and tuples of these."""
    plain = {name: float(value) if name == "lr" else value for name, value in group.items() if name != "params"}
    return {
        name: value for name, value in plain.items() if value is None or isinstance(value, int | float | str | tuple)
    }


def _in_file(value: Any) -> Any:
    return in_file(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _address_of_this_rank(world: World) -> str:
    """An address of this host that the other ranks reach."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return meeting_address("", (), interface)
    if world.num_nodes == 1:
        return "127.0.0.1"
    store = store_of_this_run()
    return own_address_to(store.address[0] if store is not None else os.environ["MASTER_ADDR"])
