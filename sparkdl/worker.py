"""The work of one rank: shards in, a trained model out."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from sparkdl.batches.reading.gather import Decode, valid_name
from sparkdl.batches.reading.loader import ShardedDataset, ShardLoader
from sparkdl.collective import open_collective
from sparkdl.collective.base import Collective, on_leader
from sparkdl.compat.heap import kept_heap
from sparkdl.compat.torch_compiler import eager
from sparkdl.config import CheckpointConfig, LoaderConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.launch.rank import process_memory
from sparkdl.observe import emit, logger, span
from sparkdl.storage import Storage
from sparkdl.strategies import STRATEGIES
from sparkdl.strategies.base import Strategy, open_strategy
from sparkdl.strategies.choice import AUTO, choice_of
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint import rng
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.identity import identity_of
from sparkdl.train.checkpoint.resume import earlier_strategy
from sparkdl.train.result import TrainResult
from sparkdl.train.task import Task, make_model, make_optimizer
from sparkdl.train.trainer import fit
from sparkdl.world import World


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """One training run, as every rank receives it.

    Attributes:
        task: model, optimizer and loss, and which tensors of a batch they take.
        train_uri: shard set to train on.
        validation_uri: shard set to validate on after each epoch; None skips validation.
        batch_size: rows per rank and training step.
        validation_batch_size: rows per rank and validation step; None takes ``batch_size``.
        shuffle: whether training rows come in a new order each epoch.
        seed: of that order.
        tail: ``"exact"``, ``"drop"`` or ``"pad"``: what becomes of training rows that fill no whole step.
        decode: by tensor of byte strings, a function from the bytes of a row to an array.
        loader: how shards are read.
        validation_loader: the same for validation; None takes ``loader``.
        train: epochs, precision, stopping and the like.
        checkpoints: where and how often to save; None keeps nothing.
        callbacks: called on every rank.
        backend: ``"auto"``, ``"horovod"``, ``"torch"`` or ``"solo"``.
        strategy: how the model is spread over the ranks, a name of ``strategies.STRATEGIES``, or the text of a mesh;
            with ``"auto"`` the ranks choose, and a step has ``batch_size`` rows for every rank whatever they take.
    """

    task: Task
    train_uri: str | Storage
    validation_uri: str | Storage | None = None
    batch_size: int
    validation_batch_size: int | None = None
    shuffle: bool = True
    seed: int = 0
    tail: str = "exact"
    decode: Mapping[str, Decode] = field(default_factory=dict)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    validation_loader: LoaderConfig | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoints: CheckpointConfig | None = None
    callbacks: tuple[Callback, ...] = ()
    backend: str = "auto"
    strategy: str = "all_reduce"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank has to tell.

    Attributes:
        result: history, best epoch, steps and rows of the run; its ``model`` is an empty module, ``optimizer`` None.
        weights: the model's state on the CPU, by name; None on every rank but the leader.
        optimizer: the optimizer's state on the CPU, as its ``state_dict()``; None on every rank but the leader.
        seconds: wall-clock seconds by span: join, open, fit.
    """

    result: TrainResult
    weights: dict[str, torch.Tensor] | None
    optimizer: dict[str, Any] | None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """What carried the gradients, as ``TrainResult`` says it."""
        return self.result.backend


def run_rank(world: World, job: RankJob) -> RankReport:
    """Train ``job`` as rank ``world.rank``.

    This is the one place where batches, collective, strategies and train meet, and it knows nothing of Spark, so that a
    machine without Java trains from the same shards.

    Raises:
        SparkdlError: whatever the stages refuse; the other ranks are left without waiting for them.
    """
    seconds: dict[str, float] = {}
    with span("join", seconds):
        collective = open_collective(world, backend=job.backend, gradient_bytes=_gradient_bytes(job.task))
    failed = True
    try:
        with eager(), kept_heap():
            text = job.strategy
            if text == AUTO:
                with span("choose", seconds):
                    text = _chosen(world, job, collective)
            strategy = open_strategy(text, collective, job.train)
            result = _trained(world, job, collective, strategy, seconds)
            state = _on_cpu(strategy.state_dict()) or {}
        failed = False
    finally:
        collective.close(failed=failed)
    # Module and optimizer stay here: on the driver their states are enough, and these travel once.
    result = replace(result, model=torch.nn.Module(), optimizer=None)
    return RankReport(result=result, weights=state.get("model"), optimizer=state.get("optimizer"), seconds=seconds)


def _trained(
    world: World, job: RankJob, collective: Collective, strategy: Strategy, seconds: dict[str, float]
) -> TrainResult:
    with span("open", seconds):
        # The strategy says which rows this rank reads.
        reader = replace(world, rank=strategy.data_rank, size=strategy.data_size)
        sharing = world.size // strategy.data_size if job.strategy == AUTO else 1  # ranks that read the same rows
        train, validation = _training(job, reader, sharing), _validation(job, reader, sharing)
        checkpoints = None
        if job.checkpoints:
            held_out = validation.dataset.manifest if validation is not None else None
            identity = run_identity(job, train.dataset.manifest, held_out)
            checkpoints = Checkpointer(job.checkpoints, identity)
    with span("fit", seconds):
        return fit(
            job.task,
            train,
            validation,
            collective=collective,
            config=job.train,
            callbacks=job.callbacks,
            checkpoints=checkpoints,
            strategy=strategy,
        )


def _chosen(world: World, job: RankJob, collective: Collective) -> str:
    """The strategy that ``"auto"`` stands for: an earlier attempt's, or what the planner puts first; why is logged."""
    task = job.task
    if world.size == 1 or task.manual_step is not None or task.train_step is not None:
        return "all_reduce"

    def earlier() -> str | None:
        text = earlier_strategy(Checkpointer(job.checkpoints)) if job.checkpoints else None
        return text if text is not None and _is_filled(text, world.size) else None

    choice = on_leader(collective, earlier)
    if choice is not None:
        return choice
    from sparkdl.strategies.planner import choose  # with DTensor

    device = torch.device(world.device)
    with rng.isolated(device):
        copied = copy.deepcopy(task)  # the optimizer may be of this model alone
        model = make_model(copied, device, seed=job.train.seed, channels_last=job.train.channels_last)
        reader = replace(world, rank=0, size=1)
        batches = _training(replace(job, shuffle=False), reader, world.size)
        batch = next(iter(batches))
        example = {name: batch[name].to(device).clone() for name in task.inputs}
        batches.end_epoch()
        text, why = choose(
            collective,
            job.train,
            model,
            lambda made: make_optimizer(copied, made, device),
            example,
            memory_bytes=_free_bytes(device) / world.local_size,
            by_user=task.forward is not None,
            input_style=task.input_style,
        )
    if world.is_leader:
        logger.info("strategy='auto' takes %s", why)
        emit("log", message=f"strategy='auto' takes {why}")
    return text


def _is_filled(strategy: str, ranks: int) -> bool:
    """Whether so many ranks fill it, of which fewer may be left than an earlier attempt had."""
    if strategy in STRATEGIES:
        return True
    try:
        choice_of(strategy).filled(ranks)
    except ConfigError:
        return False
    return True


def _free_bytes(device: torch.device) -> float:
    """Memory that is left on this host or device, as far as anybody knows."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0]) * torch.cuda.device_count()
    return float(process_memory.look().get("free", math.inf))


class _Rows(Protocol):
    """The part of the manifest of a shard set that tells what its rows are."""

    @property
    def rows(self) -> int: ...

    @property
    def content_hash(self) -> str: ...


def run_identity(job: RankJob, train: _Rows, validation: _Rows | None) -> dict[str, str]:
    """What decides the run, see ``train.checkpoint.identity``; the same on the driver and on the ranks.

    Args:
        job: as a rank has it before its first step.
        train: manifest of the set at ``job.train_uri``.
        validation: of that at ``job.validation_uri``.
    """

    def rows(manifest: _Rows | None) -> Any:
        return None if manifest is None else f"{manifest.rows} rows, content {manifest.content_hash[:8]}"

    settings = {"training data": rows(train), "validation data": rows(validation)}
    settings |= {name: getattr(job, name) for name in ("batch_size", "shuffle", "seed", "tail")}
    settings |= {"pool_bytes": job.loader.pool_bytes, "lanes": job.loader.lanes}
    return identity_of(job.task, job.train, settings)


def _open(job: RankJob, uri: str | Storage, config: LoaderConfig) -> ShardedDataset:
    """Open a set for the tensors that the task names, so that the others are not read; a custom step may use any."""
    if job.task.train_step is not None or job.task.manual_step is not None:
        return ShardedDataset(uri, config=config)
    names = [*job.task.inputs, *job.task.labels]
    if job.task.sample_weight:
        names.append(job.task.sample_weight)
    derived = {valid_name(name) for name in names}  # masks that padding makes, and no shard holds
    return ShardedDataset(uri, tensors=[name for name in names if name not in derived], config=config)


def _decode(job: RankJob, dataset: ShardedDataset) -> dict[str, Decode]:
    read = {spec.name for spec in dataset.tensors}
    return {name: hook for name, hook in job.decode.items() if name in read}


def _training(job: RankJob, world: World, sharing: int = 1) -> ShardLoader:
    dataset = _open(job, job.train_uri, job.loader)
    return dataset.loader(
        world=world,
        batch_size=job.batch_size * sharing,
        shuffle=job.shuffle,
        seed=job.seed,
        tail=job.tail,
        decode=_decode(job, dataset),
    )


def _validation(job: RankJob, world: World, sharing: int = 1) -> ShardLoader | None:
    """Validation reads in file order, and every row once: its mean is exact."""
    if job.validation_uri is None:
        return None
    dataset = _open(job, job.validation_uri, job.validation_loader or job.loader)
    rows = (job.validation_batch_size or job.batch_size) * sharing
    return dataset.loader(world=world, batch_size=rows, shuffle=False, decode=_decode(job, dataset))


def _gradient_bytes(task: Task) -> int | None:
    """What a step sends; None where the model is still to be made."""
    if not isinstance(task.model, torch.nn.Module):
        return None
    return sum(p.numel() * p.element_size() for p in task.model.parameters() if p.requires_grad)


def _on_cpu(value: Any) -> Any:
    """The same value with its tensors, however deep in dicts and lists, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(item) for item in value)
    return value
