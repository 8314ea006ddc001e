"""A parameter server: parts of the parameters, the optimizer that steps them, and the clocks of the workers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.collective.base import as_bytes
from sparkdl.errors import ClusterError, SparkdlError, UnreachableError
from sparkdl.launch.wire import Connection, Listener, WireError, authenticated, connect, dump_value, load_value
from sparkdl.strategies.all_reduce import fitting

_ALIGNMENT = 16
_ANSWERED_LATER = ("push",)  # what is wrong with it, the next answer says

Rows = tuple[torch.Tensor, torch.Tensor]
"""Row numbers ``(n,)``, each once, and the gradients of these rows ``(n, ...)``."""


@dataclass(frozen=True, slots=True)
class Message:
    """What travels either way.

    Attributes:
        message: JSON-able.
        tensors: on the CPU.
        value: anything picklable.
    """

    message: Mapping[str, Any]
    tensors: Sequence[torch.Tensor] = ()
    value: Any = None


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter, or the rows of a table, that a server holds.

    Attributes:
        parameter: on the CPU.
        group: number of its group in the workers' optimizer.
        is_table: whether workers ask for single rows of it.
    """

    parameter: torch.nn.Parameter
    group: int
    is_table: bool


class Workers:
    """Which workers take part, for the servers of one process; ``changed`` guards all that these hold.

    Args:
        size: number of workers.
        tolerant: whether the others go on without one that is gone.
        tell: is called with the worker that they go on without, and why it is gone.

    Attributes:
        lost: what to raise everywhere, once one is gone that nobody goes on without.
    """

    def __init__(self, size: int, tolerant: bool, tell: Callable[[int, str], None] | None = None) -> None:
        self.size, self.alive, self.changed = size, set(range(size)), threading.Condition()
        self.lost: str | None = None
        self._tolerant, self._tell = tolerant, tell

    def leave(self, worker: int, why: str = "") -> None:
        """Wait for ``worker`` no longer; ``why`` is empty where it is through."""
        with self.changed:
            is_news = worker in self.alive and bool(why)
            self.alive.discard(worker)
            if is_news and not self._tolerant:
                self.lost = f"rank {worker} is gone ({why}): the rank that failed first says why"
            self.changed.notify_all()
        if is_news and self._tolerant and self._tell is not None:
            self._tell(worker, why)


@dataclass(frozen=True, slots=True)
class _Push:
    clock: int
    gradients: Mapping[int, torch.Tensor | Rows]
    keeps_sparse: frozenset[int]
    groups: Sequence[Mapping[str, Any]]


class Server:
    """Holds parameters, and steps them with what workers push.

    With ``staleness=0`` the gradients of one clock are averaged over the workers that pushed, in their order, and
    stepped once. Otherwise each push is a step by itself, of an N-th of the learning rate for N workers, so that a
    round of pushes goes about as far as one step of the mean.

    Args:
        parts: what it holds.
        optimizer: of the parameters of ``parts``, with a group for each number of group that ``parts`` has, in order.
        workers: all of them.
        staleness: clocks that a worker may be ahead of the slowest; None sets no bound.
        seconds: how long a worker waits for others.
        clocks: of the workers, where the server goes on for one that is gone.
    """

    def __init__(
        self,
        parts: Sequence[Held],
        optimizer: torch.optim.Optimizer,
        workers: Workers,
        staleness: int | None,
        seconds: float,
        clocks: Sequence[int] | None = None,
    ) -> None:
        self.parts, self.optimizer, self.workers = list(parts), optimizer, workers
        self.clocks = list(clocks or [0] * workers.size)
        self.restore: Callable[[int], tuple[str, int]] | None = None
        self._staleness, self._seconds = staleness, seconds
        self._groups = sorted({part.group for part in parts})
        self._pushed: dict[int, _Push] = {}
        self._averaged = self._measured = self._stepped = 0  # the clocks whose gradients were
        self._square = 0.0
        self._loading: dict[int, Any] = {}
        self._gathered: dict[int, dict[int, torch.Tensor]] = {}
        self._broken: str | None = None

    # --- what workers ask for -------------------------------------------------------------------------------------

    @torch.no_grad()
    def perform(self, worker: int, asked: Message) -> Message:
        """Do what ``worker`` asks for; returns once that is done, and the others are as far as it takes.

        Raises:
            ClusterError: the others did not come so far in time, or the optimizer failed.
            UnreachableError: one of them is gone.
        """
        message = asked.message
        if message["op"] == "restore" and self.restore is not None:
            return Message({"address": self.restore(message["server"])})
        with self.workers.changed:
            if self.workers.lost:
                raise UnreachableError(self.workers.lost)
            try:
                match message["op"]:
                    case "push":
                        return self._push(worker, asked)
                    case "norm":
                        return self._norm(message["clock"])
                    case "pull":
                        return self._pull(message["clock"], message["factor"])
                    case "rows":
                        table = self.parts[message["part"]].parameter
                        return Message({}, [table[asked.tensors[0]]])
                    case "clocks":
                        return Message({"clocks": list(self.clocks), "alive": sorted(self.workers.alive)})
                    case "gather":
                        return self._gather(worker, message["number"], asked.tensors[0])
                    case "state":
                        return self._state(message["part"], message["rows"], message["optimizer"])
                    case "load":
                        return self._load(message["part"], message["rows"], *asked.value)
                    case "loaded":
                        return self._take_over(asked.value)
                    case op:
                        raise ClusterError(f"a parameter server does not do {op!r}: all ranks need one version of it")
            except SparkdlError:
                raise
            except Exception as error:  # of an optimizer of the user's own, say
                self._broken = f"a parameter server failed to {message['op']} ({type(error).__name__}: {error})"
                self.workers.changed.notify_all()
                raise ClusterError(self._broken) from error

    def _push(self, worker: int, asked: Message) -> Message:
        message, tensors = asked.message, list(asked.tensors)
        gradients: dict[int, torch.Tensor | Rows] = {part: tensors.pop(0) for part in message["dense"]}
        gradients |= {part: (tensors.pop(0), tensors.pop(0)) for part, _ in message["rows"]}
        keeps_sparse = frozenset(part for part, is_sparse in message["rows"] if is_sparse)
        push = _Push(message["clock"], gradients, keeps_sparse, message["groups"])
        self.clocks[worker] = max(self.clocks[worker], push.clock)
        if self._staleness == 0:
            if push.clock > self._stepped:  # else it was on its way while another server took over
                self._pushed[worker] = push
        elif gradients:  # a worker without rows makes no step
            self._average([push])
            self._apply(push.groups, 1 / self.workers.size)
        self.workers.changed.notify_all()
        return Message({})

    def _norm(self, clock: int) -> Message:
        self._wait_for_mean(clock)
        if self._measured < clock:  # by the first who asks: behind its pull, the gradients are gone
            gradients = [part.parameter.grad for part in self.parts if part.parameter.grad is not None]
            values = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
            self._square = sum(float(value.double().square().sum()) for value in values)
            self._measured = clock
        return Message({"square": self._square})

    def _pull(self, clock: int, factor: float) -> Message:
        if self._staleness == 0:
            if self._stepped < clock:
                self._wait_for_mean(clock)
            if self._stepped < clock:
                if factor != 1:
                    for part in self.parts:
                        if part.parameter.grad is not None:
                            part.parameter.grad.mul_(factor)
                first = min(worker for worker, push in self._pushed.items() if push.clock == clock)
                self._apply(self._pushed[first].groups, 1.0)
                self._stepped = clock
                self._pushed = {worker: push for worker, push in self._pushed.items() if push.clock > clock}
        elif self._staleness is not None:
            self._wait_for_clocks(clock - self._staleness)
        values = [part.parameter.detach() for part in self.parts if not part.is_table]
        # Synchronous workers read before anybody pushes again; others may step them meanwhile.
        return Message({}, values if self._staleness == 0 else [value.clone() for value in values])

    def _gather(self, worker: int, number: int, mine: torch.Tensor) -> Message:
        """Return what every worker that lives gave for its ``number``-th exchange."""
        parts = self._gathered.setdefault(number, {})
        parts[worker] = mine
        self._gathered.pop(number - 2, None)  # whoever begins with one has the one before, and nobody lacks two
        self.workers.changed.notify_all()
        self._wait(lambda: self.workers.alive <= parts.keys(), lambda: self.workers.alive - parts.keys())
        return Message({"workers": sorted(parts)}, [parts[worker] for worker in sorted(parts)])

    def _state(self, index: int, rows: Sequence[int] | None, with_optimizer: bool) -> Message:
        """Return the values of a part and what the optimizer has of it; of ``rows`` alone, the second not included."""
        parameter = self.parts[index].parameter
        state = self.optimizer.state.get(parameter, {}) if with_optimizer else {}

        def cut(value: Any) -> Any:
            has_rows = rows and isinstance(value, torch.Tensor) and value.shape == parameter.shape
            return value[slice(*rows)] if has_rows and rows else value

        return Message({}, value=(cut(parameter.detach()), {name: cut(value) for name, value in state.items()}))

    def _load(self, index: int, rows: Sequence[int] | None, values: torch.Tensor, state: Mapping[str, Any]) -> Message:
        """Take over what ``_state`` returns, the state of the optimizer with ``_take_over``."""
        parameter = self.parts[index].parameter
        (parameter[slice(*rows)] if rows else parameter).copy_(values)
        loading = self._loading.setdefault(index, {})
        for name, value in state.items():
            if rows and isinstance(value, torch.Tensor) and value.shape == values.shape:
                loading.setdefault(name, value.new_empty(parameter.shape))[slice(*rows)] = value
            else:
                loading[name] = value
        return Message({})

    def _take_over(self, groups: Sequence[Mapping[str, Any]] | None) -> Message:
        """Let the optimizer go on from what was loaded, with these options; with None, as it was."""
        if groups is not None:
            param_groups = [
                {**groups[number], "params": [i for i, part in enumerate(self.parts) if part.group == number]}
                for number in self._groups
            ]
            states = {index: state for index, state in self._loading.items() if state}
            with fitting("optimizer"):
                self.optimizer.load_state_dict({"state": states, "param_groups": param_groups})
        self._loading.clear()
        return Message({})

    # --- steps ----------------------------------------------------------------------------------------------------

    def _wait_for_mean(self, clock: int) -> None:
        """Wait until all have pushed ``clock``, and let every ``grad`` be the mean of what they pushed."""
        self._wait_for_clocks(clock)
        if self._averaged < clock:
            pushes = [push for _, push in sorted(self._pushed.items()) if push.clock == clock]
            self._average(pushes)
            self._averaged = clock

    def _average(self, pushes: Sequence[_Push]) -> None:
        for index, part in enumerate(self.parts):
            parameter, gradients = part.parameter, [p.gradients[index] for p in pushes if index in p.gradients]
            parameter.grad = None
            if not gradients:
                continue
            rows = [gradient for gradient in gradients if isinstance(gradient, tuple)]
            dense = [gradient for gradient in gradients if not isinstance(gradient, tuple)]
            if rows:
                numbers, values = (torch.cat(parts) for parts in zip(*rows, strict=True))
                total = torch.sparse_coo_tensor(numbers[None], values, parameter.shape, check_invariants=False)
                total = total.coalesce()
                if dense or not any(index in push.keeps_sparse for push in pushes):
                    total = total.to_dense()
                dense.append(total)
            total = functools.reduce(torch.add, dense)
            parameter.grad = total / len(pushes) if len(pushes) > 1 else total

    def _apply(self, groups: Sequence[Mapping[str, Any]], share: float) -> None:
        """Step with the options that a worker's groups have, and ``share`` of the learning rate."""
        for group, number in zip(self.optimizer.param_groups, self._groups, strict=True):
            for name, value in groups[number].items():
                group[name] = tuple(value) if isinstance(value, list) else value
            if share != 1:
                group["lr"] = group["lr"] * share
        self.optimizer.step()
        for part in self.parts:
            part.parameter.grad = None

    def _wait_for_clocks(self, clock: int) -> None:
        def behind() -> set[int]:
            return {worker for worker in self.workers.alive if self.clocks[worker] < clock}

        self._wait(lambda: not behind(), behind)

    def _wait(self, is_there: Callable[[], bool], missing: Callable[[], set[int]]) -> None:
        if not self.workers.changed.wait_for(lambda: self._broken or self.workers.lost or is_there(), self._seconds):
            raise ClusterError(
                f"a parameter server waited {self._seconds:g} s for worker {', '.join(map(str, sorted(missing())))}, "
                "which lives and pushes nothing: see what it does, or raise the timeout"
            )
        if self._broken:
            raise ClusterError(self._broken)
        if self.workers.lost:
            raise UnreachableError(self.workers.lost)

    # --- connections ----------------------------------------------------------------------------------------------

    def serve(self, connection: Connection) -> None:
        """Answer one worker until it hangs up."""
        worker = None
        try:
            worker = int(_receive(connection).message["worker"])
            while True:
                request = _receive(connection)
                if request.message["op"] == "bye":
                    self.workers.leave(worker)
                    return
                try:
                    reply = self.perform(worker, request)
                except SparkdlError as error:
                    reply = Message({"error": str(error), "is_lost": isinstance(error, UnreachableError)})
                if request.message["op"] not in _ANSWERED_LATER:
                    _send(connection, reply)
        except (OSError, WireError) as error:
            if worker is not None:
                self.workers.leave(worker, str(error))


def host(server: Server, address: str, secret: bytes) -> Listener:
    """Let ``server`` be reached at a free port of ``address`` by who holds ``secret``.

    Workers speak to it over the authenticated connections of ``launch.wire``. ``torch.distributed.rpc`` was not taken:
    it unpickles whatever comes from whoever reaches its port. Gradients and parameters travel as bytes here; what is
    pickled, the state of an optimizer and what ranks gather, comes from an end that has proved to hold the secret of
    the run.
    """
    return Listener(address, authenticated(secret), server.serve, backlog=server.workers.size)


class DirectLink:
    """A worker's way to the server in its own process."""

    def __init__(self, server: Server, worker: int) -> None:
        self._server, self._worker = server, worker
        self._answers: list[Message] = []

    def send(self, asked: Message) -> None:
        """Ask, and wait for the answer; ask other servers first."""
        reply = self._server.perform(self._worker, asked)
        if asked.message["op"] not in _ANSWERED_LATER:
            self._answers.append(reply)

    def receive(self) -> Message:
        """Return the answer."""
        return self._answers.pop(0)

    def close(self, *, failed: bool) -> None:
        """Leave: whoever waits in this process for this worker, waits no longer."""
        self._server.workers.leave(self._worker, "it failed" if failed else "")


class WireLink:
    """A worker's connection to a server.

    Raises:
        OSError: nobody is there.
        WireError: it does not hold the secret.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, worker: int) -> None:
        self._connection = connect(address, secret)
        self._connection.send({"worker": worker})

    def send(self, asked: Message) -> None:
        """Ask; every operation but a push has an answer, and these come in order."""
        _send(self._connection, asked)

    def receive(self) -> Message:
        """Wait for the next answer.

        Raises:
            ClusterError: the server could not do it.
            UnreachableError: a worker is gone.
            OSError: the server is gone.
        """
        reply = _receive(self._connection)
        if "error" in reply.message:
            error = UnreachableError if reply.message["is_lost"] else ClusterError
            raise error(str(reply.message["error"]))
        return reply

    def close(self, *, failed: bool) -> None:
        """Hang up: with a word, or, where this worker failed, without one, so that it counts as gone. Idempotent."""
        if not failed:
            with contextlib.suppress(OSError):  # the server may have left first
                self._connection.send({"op": "bye"})
        self._connection.close()


Link = DirectLink | WireLink


def _send(connection: Connection, sent: Message) -> None:
    pieces = []
    for tensor in sent.tensors:
        data = as_bytes(tensor)
        pieces += [data, data.new_zeros(-data.numel() % _ALIGNMENT)]
    pieces.append(torch.zeros(_ALIGNMENT, dtype=torch.uint8))  # no value of the wire is empty
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in sent.tensors]
    value = [] if sent.value is None else dump_value(sent.value)
    connection.send_value({**sent.message, "tensors": kinds}, [torch.cat(pieces).numpy().data, *value])


def _receive(connection: Connection) -> Message:
    message, parts = connection.receive()
    tensors, offset = [], 0
    for name, shape in message.pop("tensors", ()):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise WireError(f"a tensor of dtype {name!r} was sent, which this version of torch does not have")
        count = torch.Size(shape).numel()
        flat = torch.frombuffer(parts[0], dtype=dtype, count=count, offset=offset) if count else torch.empty(0)
        tensors.append(flat.to(dtype).view(shape))
        offset += count * dtype.itemsize + -(count * dtype.itemsize) % _ALIGNMENT
    return Message(message, tensors, load_value(parts[1:]) if parts[1:] else None)
