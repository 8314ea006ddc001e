"""The state by which a run goes on exactly where it was: taken together, and put back on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from sparkdl.collective.base import Collective, on_leader
from sparkdl.documents.typed import Count, Source, convert
from sparkdl.errors import CheckpointError, ConfigError, IntegrityError, SparkdlError
from sparkdl.observe import emit, logger
from sparkdl.strategies.base import Strategy
from sparkdl.train.callbacks import Run
from sparkdl.train.checkpoint import rng
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.identity import check_same
from sparkdl.world import World

Start = Literal["fresh", "exact", "warm"]
_FACTS = "facts"


@dataclass(frozen=True, slots=True)
class _Position:
    epoch: Count
    batch: Count
    step: Count
    rows: Count


@dataclass(frozen=True, slots=True)
class _Rate:
    steps: Count
    nominal: list[Any]
    scaled_by: Count
    scheduler: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Stopping:
    best_value: float | None
    best_epoch: Count | None
    waited: Count


@dataclass(frozen=True, slots=True)
class _ModelSelection:
    stopping: _Stopping
    row: dict[str, Any]
    best_loss: float | None = None


@dataclass(frozen=True, slots=True)
class _History:
    steps: Any
    rows: Count
    epochs: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Rank:
    rng: dict[str, Any]
    metrics: Any
    strategy: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """What a checkpoint says of its run in its JSON file, so that the driver can refuse without the tensors.

    Attributes:
        identity: what decides the run; None if nobody told.
        fit_id: of the call of fit that wrote it.
        epochs: epochs that were trained.
        partly: whether a part of the next one was.
        shapes: of the model's tensors, by name.
        cuts: the modules that the stages of a pipeline began with; None without stages.
        strategy: how the model was spread; None if nobody told.
    """

    identity: dict[str, str] | None = None
    fit_id: str = ""
    epochs: Count = 0
    partly: bool = False
    shapes: dict[str, list[Count]] | None = None
    cuts: list[str] | None = None
    strategy: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """What the trainer puts into a checkpoint; the inside of a dict is for whoever takes it over."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    rate: _Rate
    scaler: dict[str, Any] | None
    ranks: list[_Rank]
    loader: dict[str, Any]
    run: _Position
    window: dict[str, Any]
    model_selection: _ModelSelection
    callbacks: list[Any]
    history: _History
    facts: _Facts = _Facts()
    sync: dict[str, Any] = field(default_factory=dict)
    manual: dict[str, Any] | None = None
    frozen: list[str] | None = None
    groups: list[list[str]] | None = None


def check_state(state: dict[str, Any]) -> None:
    """Refuse a state that the trainer has not written, whatever its hash: the checkpoint before is taken then.

    A name that an earlier version gave to a part becomes today's.

    Raises:
        IntegrityError: something is missing, unknown, or of another type; names it.
    """
    if "judge" in state:
        state.setdefault("model_selection", state.pop("judge"))
    convert(state, _State, Source("its state", "resume from another one"))


@contextmanager
def going_on(step: int) -> Iterator[None]:
    """Let whatever a part makes of a state that is not its own be one error.

    Raises:
        CheckpointError: the block raised something untyped.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as cause:
        if isinstance(cause, SparkdlError):
            raise
        raise CheckpointError(
            f"the checkpoint of step {step} holds a state that this run cannot take over ({type(cause).__name__}: "
            f"{cause}): resume with the task that wrote it, or start afresh in an empty folder"
        ) from cause


def facts_of(checkpoints: Checkpointer, run: Run, model: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Return what a checkpoint of ``run`` shall say of it: the part of its state that ``check_start`` reads.

    Args:
        checkpoints: where it will lie.
        run: where it stands.
        model: the whole state of its model.
        strategy: how the model is spread.
    """
    facts = {"identity": checkpoints.identity, "fit_id": checkpoints.config.fit_id}
    epochs = {"epochs": run.epoch, "partly": run.batch > 0}
    spread = {"strategy": strategy.text, "cuts": None if strategy.cuts is None else list(strategy.cuts)}
    return {_FACTS: facts | epochs | spread | {"shapes": _shapes(model)}}


def earlier_cuts(checkpoints: Checkpointer) -> list[str] | None:
    """The modules that stages began with, as the newest checkpoint says; None where it or they are none.

    Raises:
        CheckpointError: there are checkpoints, and none can be read.
    """
    newest = checkpoints.peek(_FACTS)
    return None if newest is None else _facts(checkpoints, *newest).cuts


def earlier_strategy(checkpoints: Checkpointer) -> str | None:
    """How the model was spread, as the newest checkpoint says; None where there is none or it does not.

    Raises:
        CheckpointError: there are checkpoints, and none can be read.
    """
    newest = checkpoints.peek(_FACTS)
    return None if newest is None else _facts(checkpoints, *newest).strategy


def check_start(checkpoints: Checkpointer, model: torch.nn.Module, epochs: int) -> Start:
    """Say how a run with these checkpoints will start, by the newest one's JSON file alone.

    Args:
        checkpoints: where they lie, what the run shall make of them, and its identity.
        model: the one to train.
        epochs: how many it shall have trained in the end.

    Raises:
        ConfigError: they must not be there, or none is; the run is another one; it has trained more epochs already.
        CheckpointError: none can be read, or its weights do not fit ``model``.
    """
    newest = checkpoints.peek(_FACTS)
    if newest is None:
        return _start(checkpoints, None, None, epochs)
    step, part = newest
    facts = _facts(checkpoints, step, part)
    start = _start(checkpoints, step, facts, epochs)
    if start == "warm" and facts.shapes is not None:
        _check_shapes(_shapes(model.state_dict()), facts.shapes, step)
    return start


def load_newest(
    checkpoints: Checkpointer | None, strategy: Strategy, collective: Collective, *, epochs: int
) -> dict[str, Any] | None:
    """Let ``strategy``, which is built, take over the newest checkpoint; return the rest of its state on every rank.

    Returns:
        The state without what the strategy has, with ``resumed_step``, the checkpoint's number; None where the run
        starts with its first step.

    Raises:
        CheckpointError: none is whole, or it does not fit the model; on every rank.
        ConfigError: the run cannot continue from them as it is; on every rank.
    """
    if checkpoints is None:
        return None
    spread: dict[str, Any] = {}  # filled on the leader: tensors reach the other ranks by the strategy
    start, run_state = on_leader(collective, lambda: _read(checkpoints, strategy.plain_state, epochs, spread))
    if run_state is not None:
        with going_on(run_state["resumed_step"]):
            _add_groups(strategy, run_state.get("groups") or [])  # an earlier version kept none
    if start != "fresh":
        strategy.load_state_dict(spread if collective.world.is_leader else None)
    return run_state


def names_by_group(strategy: Strategy) -> list[list[str]]:
    """The names of the parameters of each group of the optimizer, as far as they are the model's."""
    names = {parameter: name for name, parameter in strategy.model.named_parameters()}
    return [
        [names[parameter] for parameter in group["params"] if parameter in names]
        for group in strategy.optimizer.param_groups
    ]


def _add_groups(strategy: Strategy, names: Sequence[Sequence[str]]) -> None:
    """Give the optimizer the groups that a callback had added; their rates and the like are in the optimizer's state.

    What does not fit the model is left to the strategy, which refuses it as it loads that state.
    """
    parameters = dict(strategy.model.named_parameters())
    stepped = set(strategy.parameters())
    for group in names[len(strategy.optimizer.param_groups) :] if strategy.takes_groups else ():
        added = [parameters[name] for name in group if name in parameters]
        if added and stepped.isdisjoint(added):
            strategy.optimizer.add_param_group({"params": added})
            stepped.update(added)


def _read(
    checkpoints: Checkpointer, plain_state: Callable[[], Mapping[str, Any]], epochs: int, spread: dict[str, Any]
) -> tuple[Start, dict[str, Any] | None]:
    """Read the newest checkpoint; put what a strategy spreads over the ranks into ``spread``, return the rest."""
    checkpoint = checkpoints.latest(check_state)
    if checkpoint is None:
        return _start(checkpoints, None, None, epochs), None
    state = dict(checkpoint.state)
    facts = _facts(checkpoints, checkpoint.step, state.pop(_FACTS, None))
    start = _start(checkpoints, checkpoint.step, facts, epochs)
    spread["model"] = state.pop("model")
    _check_shapes(_shapes(plain_state()), _shapes(spread["model"]), checkpoint.step)
    if start == "warm":
        checkpoints.offset = checkpoint.step
        message = f"warm start: from the weights of step {checkpoint.step} in {checkpoints.folder.uri}, all else afresh"
        logger.info(message)
        emit("log", message=message)
        return start, None
    checkpoints.offset = checkpoint.step - state["run"]["step"]
    spread |= {name: state.pop(name) for name in ("optimizer", "sync") if name in state}
    return start, state | {"resumed_step": checkpoint.step}


def _start(checkpoints: Checkpointer, step: int | None, facts: _Facts | None, epochs: int) -> Start:
    """How to start with the newest checkpoint, that of ``step``; None if there is none."""
    config, where = checkpoints.config, checkpoints.folder.uri
    if facts is None:
        if config.resume == "warm":
            raise ConfigError(
                f'resume="warm" starts from the newest checkpoint, and {where} holds none: name a run that has '
                "some, or leave resume out for the first one"
            )
        return "fresh"
    ours = bool(config.fit_id) and facts.fit_id == config.fit_id  # of an attempt before
    if config.resume == "never" and not ours:
        raise ConfigError(
            f'resume="never", but {where} holds checkpoints up to step {step}: give an empty folder or another '
            "run_id, or let the run resume"
        )
    if config.resume == "warm" and not ours:
        return "warm"
    check_same(facts.identity, checkpoints.identity, where)
    if facts.epochs > epochs or (facts.epochs == epochs and facts.partly):
        part = " and a part of the next" if facts.partly else ""
        raise ConfigError(f"epochs={epochs}, and the run has trained {facts.epochs}{part} already: ask for more")
    return "exact"


def _facts(checkpoints: Checkpointer, step: int, part: Any) -> _Facts:
    source = Source(f"the checkpoint of step {step} in {checkpoints.folder.uri}", "resume from another one")
    try:
        return convert({} if part is None else part, _Facts, source, f"$.state.{_FACTS}")
    except IntegrityError as cause:
        raise CheckpointError(str(cause)) from cause


def _shapes(state: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}


def _check_shapes(mine: Mapping[str, list[int]], theirs: Mapping[str, list[int]], step: int) -> None:
    """Refuse weights whose names and shapes are not the model's; the message names the first difference."""
    for name in [*mine, *theirs]:
        own_shape, saved_shape = (
            tuple(shapes[name]) if name in shapes else "no such tensor" for shapes in (mine, theirs)
        )
        if own_shape != saved_shape:
            raise CheckpointError(
                f"{name!r} is {saved_shape} in the checkpoint of step {step} and {own_shape} in the model: resume with "
                "the model that was trained"
            )


def rank_states(collective: Collective, device: torch.device, metrics: Any, strategy: Any) -> list[dict[str, Any]]:
    """Return what differs between ranks, in rank order: generators, metrics of the epoch under way, the strategy's."""
    rank_state = {"rng": rng.capture(device), "metrics": metrics, "strategy": strategy}
    return collective.all_gather_object(rank_state) if collective.world.size > 1 else [rank_state]


def restore_rank(
    states: list[dict[str, Any]], world: World, strategy: Strategy, device: torch.device, seed: int
) -> list[Any]:
    """Restore the generators of this rank, and what its strategy had of its own; return the metrics that it takes over.

    At another world size than before, the ranks draw new streams, one for each ``data_rank``: no assignment of the old
    ones would give the same dropout. Metrics are dealt out to the ranks; their sum is what counts.
    """
    if len(states) == world.size:
        rng.restore(states[world.rank]["rng"], device)
        if states[world.rank].get("strategy") is not None:
            strategy.load_rank_state(states[world.rank]["strategy"])
    else:
        rng.seed_rank(seed, strategy.data_rank)
    return [state["metrics"] for i, state in enumerate(states) if i % world.size == world.rank and state["metrics"]]
