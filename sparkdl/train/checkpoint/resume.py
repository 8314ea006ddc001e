"""All that makes a run go on exactly where it was: taken together, and put back.

Enters: the parts of a run. Leaves: one nested state for a checkpoint; from it, the same parts on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkdl.collective.base import Collective
from sparkdl.documents.typed import Count, Source, convert
from sparkdl.errors import CheckpointError, ConfigError, SparkdlError
from sparkdl.train.checkpoint import rng
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.identity import check_same
from sparkdl.train.task import Parts

__all__ = ["check_model_state", "check_state", "going_on", "load_newest", "rank_states", "restore_rank"]


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
class _Judge:
    stopping: _Stopping
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _History:
    steps: Any
    rows: Count
    epochs: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Rank:
    rng: dict[str, Any]
    metrics: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """What the loop puts into a checkpoint; the inside of a dict is for whoever takes it over."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    rate: _Rate
    scaler: dict[str, Any] | None
    ranks: list[_Rank]
    loader: dict[str, Any]
    run: _Position
    window: dict[str, Any]
    judge: _Judge
    callbacks: list[Any]
    history: _History
    identity: dict[str, str] | None = None
    sync: dict[str, Any] = field(default_factory=dict)
    manual: dict[str, Any] | None = None


def check_state(state: dict[str, Any]) -> None:
    """Refuse a state that the loop has not written, whatever its hash: the checkpoint before is taken then.

    Raises:
        IntegrityError: something is missing, unknown, or of another type; names it.
    """
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


def load_newest(
    checkpoints: Checkpointer | None, parts: Parts, collective: Collective, *, resume: bool
) -> dict[str, Any] | None:
    """Load the newest checkpoint into rank 0's model and optimizer; return the rest of its state on every rank.

    The collective's ``wrap`` brings model and optimizer to the other ranks afterwards.

    Returns:
        The state without ``model`` and ``optimizer``, with ``resumed_step``; None where there is no checkpoint.

    Raises:
        CheckpointError: none is whole, or it does not fit the model; on every rank.
        ConfigError: there are checkpoints, and the run is not to continue from them; on every rank.
    """
    if checkpoints is None:
        return None
    outcome: dict[str, Any] | SparkdlError | None = None
    if collective.world.is_leader:
        try:
            outcome = _load(checkpoints, parts, resume=resume)
        except SparkdlError as error:
            outcome = error
    outcome = collective.broadcast_object(outcome)
    if isinstance(outcome, SparkdlError):
        raise outcome
    return outcome


def _load(checkpoints: Checkpointer, parts: Parts, *, resume: bool) -> dict[str, Any] | None:
    if not resume:
        steps = checkpoints.steps()
        if steps:
            raise ConfigError(
                f"resume=False, but {checkpoints.folder.uri} holds checkpoints up to step {steps[-1]}: give an empty "
                "folder, or let the run resume"
            )
        return None
    found = checkpoints.latest(check_state)
    if found is None:
        return None
    state = dict(found.state)
    check_same(state.get("identity"), checkpoints.identity, checkpoints.folder.uri)
    model = state.pop("model")
    check_model_state(parts.model, model, f"checkpoint of step {found.step}")
    with going_on(found.step):
        parts.model.load_state_dict(model)
    try:
        parts.optimizer.load_state_dict(state.pop("optimizer"))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
        raise CheckpointError(
            f"the optimizer in the checkpoint of step {found.step} does not fit the task's ({cause}): resume with the "
            "same optimizer and parameter groups"
        ) from cause
    return state | {"resumed_step": found.step}


def check_model_state(model: torch.nn.Module, state: Mapping[str, Any], source: str) -> None:
    """Compare names and shapes of ``state`` with those of ``model``.

    Raises:
        CheckpointError: they differ; the message names the first difference.
    """
    mine = {name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    theirs = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name in [*mine, *theirs]:
        here, there = mine.get(name, "no such tensor"), theirs.get(name, "no such tensor")
        if here != there:
            raise CheckpointError(
                f"{name!r} is {there} in the {source} and {here} in the model: resume with the model that was trained"
            )


def rank_states(collective: Collective, device: torch.device, metrics: Any) -> list[dict[str, Any]]:
    """Return what differs between ranks, in rank order: generators, and metrics of the epoch under way."""
    mine = {"rng": rng.capture(device), "metrics": metrics}
    return collective.all_gather_object(mine) if collective.world.size > 1 else [mine]


def restore_rank(states: list[dict[str, Any]], rank: int, size: int, device: torch.device, seed: int) -> list[Any]:
    """Restore the generators of ``rank``; return the metric states that it takes over.

    At another world size than before, every rank draws new streams: no assignment of the old ones would give the same
    dropout. Metrics are dealt out to the ranks; their sum is what counts.
    """
    if len(states) == size:
        rng.restore(states[rank]["rng"], device)
    else:
        rng.seed_rank(seed, rank)
    return [state["metrics"] for index, state in enumerate(states) if index % size == rank and state["metrics"]]
