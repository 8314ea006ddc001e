"""The settings of every stage as frozen dataclasses, validated where they are made, with units in their names."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from sparkdl.errors import ConfigError

__all__ = [
    "BACKENDS",
    "CheckpointConfig",
    "Compression",
    "LaunchConfig",
    "LoaderConfig",
    "ScoreConfig",
    "ShardConfig",
    "SyncConfig",
    "TrainConfig",
]


BACKENDS = ("auto", "horovod", "torch")
"""What can carry gradients between ranks, by name; ``collective/open.py`` says what ``"auto"`` takes."""


class Place(Protocol):
    """An address that is resolved already, as ``storage.Storage`` is."""

    @property
    def uri(self) -> str:
        """The whole address."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def name_and_options(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``"name"`` or ``"name(option=value, ...)"``, whose values are plain ones of Python.

    Raises:
        ValueError: it is neither.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as cause:
        raise ValueError(str(cause)) from cause
    name, keywords = (call.func, call.keywords) if isinstance(call, ast.Call) else (call, [])
    if not isinstance(name, ast.Name) or (isinstance(call, ast.Call) and call.args):
        raise ValueError(f"{text!r} is no name with options")
    return name.id, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}


def _check_least(settings: object, least: float, *names: str) -> None:
    """Refuse numbers below ``least``; None is left alone."""
    for name in names:
        value = getattr(settings, name)
        require(value is None or value >= least, f"{name}={value} is below {least}: give at least {least}")


def _check_whole(settings: object, *names: str) -> None:
    """Refuse numbers such as 1.5; None is left alone, and so are numpy's whole numbers."""
    for name in names:
        value = getattr(settings, name)
        require(value is None or hasattr(value, "__index__"), f"{name}={value!r} is no whole number: give one")


def _check_choice(settings: object, name: str, *allowed: str | None) -> None:
    """Refuse what is not one of ``allowed``."""
    value = getattr(settings, name)
    require(value in allowed, f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}: choose one of these")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig:
    """How shards are written.

    Attributes:
        format: ``"ipc"`` (Arrow files, mapped into memory) or ``"parquet"`` (smaller, several times slower to
            read).
        compression: None, or ``"zstd"`` for sets that are read over a slow link.
        shard_bytes: a file is closed once it has this size; the last one of a partition is smaller.
        block_rows: rows of a record batch, the unit of hashing and of permutation; 1,000 to 4,000 suit most rows.
        block_bytes: a block of large rows is closed once it has this size.
        spread_rows: put the rows in random order over the whole set, whatever their order in the frame: the same order
            for the same rows and seed, however the frame is partitioned. While a set is written this takes its
            bytes once more where it will lie. False keeps the order of the frame, and saves the time where that is
            random already.
        seed: of that order.
        repartition: let Spark make so many even partitions of a skewed frame first; None takes them as they are.
        max_dictionary_values: distinct values that a string column may have.
    """

    format: str = "ipc"
    compression: str | None = None
    shard_bytes: int = 128 << 20
    block_rows: int = 2048
    block_bytes: int = 8 << 20
    spread_rows: bool = True
    seed: int = 0
    repartition: int | None = None
    max_dictionary_values: int = 1_000_000

    def __post_init__(self) -> None:
        _check_choice(self, "format", "ipc", "parquet")
        _check_choice(self, "compression", None, "zstd")
        _check_whole(self, "block_rows", "seed", "repartition")
        _check_least(self, 1, "shard_bytes", "block_rows", "block_bytes", "max_dictionary_values")
        require(
            self.block_rows <= 1 << 20, f"block_rows={self.block_rows} exceeds {1 << 20}: 1,000 to 4,000 suit most rows"
        )
        require(0 <= self.seed < 1 << 63, f"seed={self.seed} does not lie in 0..2**63-1: give a seed in that range")
        require(
            self.repartition is None or self.repartition >= 1,
            f"repartition={self.repartition} must be at least 1: leave it out to keep the frame's partitions",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """What gradients travel as.

    Attributes:
        kind: ``"fp16"`` or ``"bf16"``, which halve the bytes of float32; ``"powersgd"``, products of a few vectors;
            ``"topk"``, the largest numbers alone; ``"adasum"``, whole, and joined otherwise than by their mean.
        rank: with ``"powersgd"``, how many vectors a matrix travels as.
        keep: with ``"topk"``, the share of all numbers that travels.

    Raises:
        ConfigError: there is no such kind, or an option cannot be, or has nothing to act on.
    """

    kind: str
    rank: int = 4
    keep: float = 0.01

    def __post_init__(self) -> None:
        _check_choice(self, "kind", "fp16", "bf16", "powersgd", "topk", "adasum")
        for option, kind, default in (("rank", "powersgd", 4), ("keep", "topk", 0.01)):
            value = getattr(self, option)
            require(
                self.kind == kind or value == default,
                f"{option}={value!r} has nothing to act on with {self.kind}: it is an option of {kind}",
            )
        require(
            isinstance(self.rank, int) and not isinstance(self.rank, bool) and self.rank >= 1,
            f"rank={self.rank!r} is no number of vectors: give 1 or more",
        )
        require(
            isinstance(self.keep, int | float) and not isinstance(self.keep, bool) and 0 < self.keep <= 1,
            f"keep={self.keep!r} is no share of the gradients: give a number above 0, at most 1",
        )

    @classmethod
    def of_text(cls, text: str) -> Compression:
        """Read ``"fp16"``, ``"powersgd(rank=2)"``, ``"topk(keep=0.001)"`` and the like.

        Raises:
            ConfigError: it is none of these.
        """
        try:
            kind, options = name_and_options(str(text))
        except ValueError:
            kind, options = text, {}
        unknown = sorted(options.keys() - {"rank", "keep"})
        require(not unknown, f"{text!r}: {unknown[:1]} is no option of a compression: choose of rank, keep")
        return cls(kind=kind, **options)

    def __str__(self) -> str:
        options = {"powersgd": f"(rank={self.rank})", "topk": f"(keep={self.keep:g})"}
        return f"{self.kind}{options.get(self.kind, '')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """How gradients travel between ranks.

    Attributes:
        bucket_mib: gradients are fused until a message has this size, MiB; None chooses by their bytes and the number
            of ranks. Ranks that share memory send no messages.
        compression: what gradients travel as, the text of a ``Compression``; None sends them whole.
        sync_batch_norm: statistics of BatchNorm layers run over the global batch, as do InstanceNorm's running ones.
            None does so where the model has such layers and there is more than one rank, and warns of layers where it
            cannot; True raises there; False leaves each rank its own, so that N ranks train another model than one.
        shared_memory: ranks that all compute on the CPUs of one host exchange gradients through memory they share
            instead of the backend's all-reduce. None does so where the backend was chosen by ``"auto"`` and
            ``compression`` is not set: who names a backend gets its all-reduce. True raises where it cannot be done.
    """

    bucket_mib: float | None = None
    compression: str | None = None
    shared_memory: bool | None = None
    sync_batch_norm: bool | None = None

    def __post_init__(self) -> None:
        require(
            self.bucket_mib is None or self.bucket_mib > 0,
            f"bucket_mib={self.bucket_mib} must be above 0 MiB: leave it out to let sparkdl choose",
        )
        if self.compression is not None:
            try:
                Compression.of_text(self.compression)
            except ConfigError as cause:
                raise ConfigError(f"compression={self.compression!r}: {cause}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a model is trained; what is trained stands in ``train.task.Task``.

    Attributes:
        epochs: passes over the training data.
        steps_per_epoch: batches of an epoch; None takes them all. Each epoch's order is new, so the rest is not lost.
        validation_steps: batches of a validation; None takes them all.
        max_steps: stop after this many optimizer steps; None sets no bound.
        seed: of the model's initial weights (through a factory) and, with the rank, of dropout.
        precision: ``"fp32"`` (the model's own dtypes), or ``"bf16"`` or ``"fp16"`` autocast, the latter with a scaler.
        max_grad_norm: clip the gradient of the global batch to this norm; None does not clip.
        accumulate_steps: batches whose gradients make one optimizer step.
        scale_lr: multiply the learning rate by the world size; logged, and corrected if a run resumes at another size.
        warmup_steps: optimizer steps over which the learning rate climbs linearly from 0 to what the schedule says.
        monitor: column by which epochs are compared; None means ``val_loss``, or ``loss`` without validation. Of epochs
            that are equal in it the one with the least loss is the best.
        monitor_mode: ``"min"``, ``"max"``, or ``"auto"``: what the metric itself says; a loss is ``"min"``.
        early_stopping_patience: epochs without improvement after which training stops; None never stops early.
        min_delta: a change of ``monitor`` up to this size is no improvement.
        restore_best: end with the weights of the best epoch instead of the last; None means only with early stopping.
        compile: run the model through ``torch.compile``; a string is its mode.
        channels_last: keep image tensors and convolution weights in channels-last order.
        deterministic: only deterministic kernels; an operation without one raises.
        train_metrics: compute the task's metrics on training batches, too.
        window_steps: optimizer steps between two looks at the losses on all ranks (one all-reduce each); a loss that
            is not finite, or a request to stop, is noticed there, and at every checkpoint and end of an epoch.
        progress_seconds: at most one progress event in this time, seconds.
        tensorboard_dir: folder for TensorBoard event files of rank 0; None writes none.
        sync: how gradients travel between ranks.
    """

    epochs: int = 1
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    max_steps: int | None = None
    seed: int = 0
    precision: str = "fp32"
    max_grad_norm: float | None = None
    accumulate_steps: int = 1
    scale_lr: bool = False
    warmup_steps: int = 0
    monitor: str | None = None
    monitor_mode: str = "auto"
    early_stopping_patience: int | None = None
    min_delta: float = 0.0
    restore_best: bool | None = None
    compile: bool | str = False
    channels_last: bool = False
    deterministic: bool = False
    train_metrics: bool = True
    window_steps: int = 50
    progress_seconds: float = 0.25
    tensorboard_dir: str | None = None
    sync: SyncConfig = SyncConfig()

    def __post_init__(self) -> None:
        counts = ("epochs", "steps_per_epoch", "validation_steps", "max_steps", "accumulate_steps")
        _check_whole(self, *counts, "early_stopping_patience", "window_steps", "warmup_steps", "seed")
        require(
            -(1 << 63) <= self.seed < 1 << 64,
            f"seed={self.seed} does not lie in -2**63..2**64-1: give a seed in that range",
        )
        _check_least(self, 1, *counts, "early_stopping_patience", "window_steps")
        _check_least(self, 0, "warmup_steps", "min_delta", "progress_seconds")
        _check_choice(self, "precision", "fp32", "bf16", "fp16")
        compression = getattr(self.sync, "compression", None)
        require(
            self.precision != "fp16" or compression in (None, "fp16", "bf16"),
            f"precision='fp16' has steps whose gradients overflow, and compression={compression!r} would carry them "
            "into all later ones: choose precision='bf16'",
        )
        _check_choice(self, "monitor_mode", "auto", "min", "max")
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"max_grad_norm={self.max_grad_norm} is not above 0: leave it out to train without clipping",
        )

    @property
    def restores_best(self) -> bool:
        """Whether training ends with the weights of the best epoch."""
        return self.early_stopping_patience is not None if self.restore_best is None else self.restore_best


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """The place and times of checkpoints, and which of them stay.

    Attributes:
        uri: folder of the checkpoints of one run, a path, a URI or a ``Storage``.
        resume: what is made of the checkpoints that lie there already. ``"exact"`` goes on from the newest as if the
            run had never ended, and refuses other data, model or settings; without any it starts afresh. ``"warm"``
            starts from the newest one's weights, with optimizer, schedule, epochs and history afresh, on whatever
            data and settings there are now; without any it refuses. ``"never"`` refuses if there are any.
        fit_id: names one call of fit, all its attempts included; checkpoints that carry it are its own, and it goes on
            from them exactly, whatever ``resume`` says. Empty for a call that is never repeated.
        every_steps: optimizer steps between two checkpoints; None writes none inside an epoch.
        every_epochs: epochs between two checkpoints; None writes none there but the best's and the last.
        keep_last: number of newest checkpoints that are kept.
        keep_best: also keep the checkpoint of the best epoch, and write one whenever an epoch is the best so far.
    """

    uri: str | Place
    resume: str = "exact"
    fit_id: str = ""
    every_steps: int | None = None
    every_epochs: int | None = 1
    keep_last: int = 3
    keep_best: bool = True

    def __post_init__(self) -> None:
        _check_choice(self, "resume", "exact", "warm", "never")
        _check_whole(self, "every_steps", "every_epochs", "keep_last")
        for name, value in (("every_steps", self.every_steps), ("every_epochs", self.every_epochs)):
            require(value is None or value >= 1, f"{name}={value} is below 1: give at least 1, or None for never")
        require(self.keep_last >= 1, f"keep_last={self.keep_last} is below 1: a run without checkpoints needs none")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """How ranks are started, watched and ended.

    Attributes:
        start_timeout_seconds: until every rank has reported to the driver; a cluster may have to start executors in it.
        timeout_seconds: until every rank has returned, counted from the moment all have started; None waits for ever.
        stop_grace_seconds: what a rank has for its ``finally`` blocks when the run is ended, before its process is.
        silence_seconds: a rank whose host has not sent a sign of life for this long counts as dead.
        env: variables the ranks get on top of the launcher's own; these win.
        log_to_driver: print the ranks' output on the driver, each line with its rank; events travel in any case.
        stdout: what ranks write to their standard output goes there instead, as Horovod writes it:
            ``[rank]<stdout>:line``; whatever ``log_to_driver`` says.
        stderr: the same for their standard error.
        timestamps: each line begins with the time at which it reached the driver.
        log_kib_per_second: output of a rank beyond this rate, after a burst of 4 MiB, is dropped and counted, KiB/s.
        driver_host: address of the driver as executors reach it; None takes ``spark.driver.host``. On Spark Connect,
            where the client is not the driver, naming one says that executors reach the client, and logs become live.
        interface: network interface the ranks talk over; None takes the one on the route to the other hosts.
        gpus_per_rank: GPUs each rank must get from Spark; 0 uses none; None takes what Spark gives the task.
        cpus_per_rank: CPUs each rank asks of Spark (stage-level scheduling) and as many intra-op threads; None takes
            ``spark.task.cpus``.
        gather_rendezvous: find each other by one allGather of the barrier stage instead of a channel to the driver;
            None does so on Spark Connect where no ``driver_host`` is named.
        preload: modules that ranks import while they wait for each other, since the function will need them; with
            ``env`` none is, as a module may read its variables when it is imported.
    """

    start_timeout_seconds: float = 120.0
    timeout_seconds: float | None = None
    stop_grace_seconds: float = 2.0
    silence_seconds: float = 60.0
    env: Mapping[str, str] = field(default_factory=dict)
    log_to_driver: bool = True
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    timestamps: bool = False
    log_kib_per_second: float = 256.0
    driver_host: str | None = None
    interface: str | None = None
    gpus_per_rank: int | None = None
    cpus_per_rank: int | None = None
    gather_rendezvous: bool | None = None
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("start_timeout_seconds", "timeout_seconds", "silence_seconds", "log_kib_per_second"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            require(
                number or (value is None and name == "timeout_seconds"),
                f"{name}={value!r} is a {type(value).__name__}: give a number",
            )
            require(value is None or value > 0, f"{name}={value} must be above 0: leave it out for the default")
        require(self.stop_grace_seconds >= 0, f"stop_grace_seconds={self.stop_grace_seconds} must not be negative")
        require(
            self.gpus_per_rank is None or self.gpus_per_rank >= 0,
            f"gpus_per_rank={self.gpus_per_rank} must not be negative: 0 uses no GPU",
        )
        require(
            self.cpus_per_rank is None or self.cpus_per_rank > 0,
            f"cpus_per_rank={self.cpus_per_rank} must be at least 1: leave it out for spark.task.cpus",
        )
        require(
            isinstance(self.preload, tuple) and all(isinstance(name, str) for name in self.preload),
            f"preload={self.preload!r} is no tuple of modules' names: give one, for instance ('torchvision',)",
        )
        for name in ("stdout", "stderr"):
            stream = getattr(self, name)
            try:
                if stream is not None:
                    stream.write("")
            except Exception as cause:
                raise ConfigError(
                    f"{name}={stream!r} is a {type(stream).__name__} that takes no text: give an open "
                    "text stream, such as open(path, 'w')"
                ) from cause
        wrong = [name for name, value in self.env.items() if not isinstance(name, str) or not isinstance(value, str)]
        require(not wrong, f"env has values that are not strings for {wrong}: environment variables are text")
        wrong = [name for name, value in self.env.items() if not name or "=" in name or "\0" in name + value]
        require(
            not wrong,
            f"env has {wrong}, which no environment can hold: names are not empty, have no '=', and nothing has a NUL",
        )

    @property
    def tells_streams_apart(self) -> bool:
        """Whether standard output and standard error go to different places."""
        return self.stdout is not None or self.stderr is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """How shards are read into batches.

    Attributes:
        pool_bytes: rows of this many bytes are shuffled among each other, blocks over the whole set; about the size of
            the processor's last cache. What a rank allocates for reading stays below it too. Part of what the order of
            rows depends on.
        lanes: independent streams a step draws from; a power of two up to 64 that fits the pool if None. With at least
            as many lanes as ranks a rank reads only its share of the bytes. Part of what the order depends on.
        chunk_bytes: rows are gathered in buffers of this size at most, less where a small pool leaves no room for
            several, or of one step where that is more; a batch that is kept keeps its buffer.
        prefetch_bytes: gathered ahead of the consumer, at least one chunk more than there are threads, which is what
            None takes.
        threads: that gather; None takes the cores of the host divided by its ranks, at most 4.
        decode_threads: that run decode hooks; None takes the cores of the host divided by its ranks.
        fetch_threads: that fetch and decompress blocks which cannot be mapped where they lie.
        on_damage: ``"error"`` raises on a block that differs from its hash; ``"substitute"`` puts the rows of the next
            whole block in their place, and logs it.
        verify: ``"first"`` compares a block with its hash when it is first read, and again when its file has changed
            (looked for as an epoch begins and ends: one ``stat`` a file); ``"epoch"`` does so in every epoch, which
            also finds what a failing disk or memory does to a file, for a third of the reading speed (measured: 10.9
            instead of 16.0 M rows/s of 40 floats, mapped files, 2 cores).
        ragged: ``"padded"`` gives ``(rows, longest, ...)`` and a mask ``<name>__valid``; ``"jagged"`` nested tensors.
        pad_value: fills padded rows.
        max_length: ragged rows are cut off behind this many elements; None keeps them whole.
        pin_memory: gather into page-locked memory, for copies to a GPU.
        cache_dir: of blocks that cannot be mapped where they lie; None takes ``$SPARKDL_CACHE``, or a folder of this
            user in the system's directory of temporary files.
        cache_bytes: bound of that cache, shared by all processes that use it.
    """

    pool_bytes: int = 64 << 20
    lanes: int | None = None
    chunk_bytes: int = 8 << 20
    prefetch_bytes: int | None = None
    threads: int | None = None
    decode_threads: int | None = None
    fetch_threads: int = 8
    on_damage: str = "error"
    verify: str = "first"
    ragged: str = "padded"
    pad_value: float = 0
    max_length: int | None = None
    pin_memory: bool = False
    cache_dir: str | None = None
    cache_bytes: int = 32 << 30

    def __post_init__(self) -> None:
        counts = ("lanes", "max_length", "threads", "decode_threads", "fetch_threads")
        _check_whole(self, *counts)
        _check_least(self, 1, *counts, "pool_bytes", "chunk_bytes", "prefetch_bytes", "cache_bytes")
        _check_choice(self, "on_damage", "error", "substitute")
        _check_choice(self, "verify", "first", "epoch")
        _check_choice(self, "ragged", "padded", "jagged")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreConfig:
    """How rows are scored.

    Attributes:
        batch_rows: rows that go through the model at once; with the model, this bounds a task's memory.
        nulls: what a null in a feature column means: ``"error"`` refuses it, ``"null"`` gives that row null
            predictions, ``"nan"`` passes NaN to the model. NaN in the data is a number and always reaches the model.
        vectors: give floating-point outputs of shape (k,) as Spark ML vectors instead of arrays.
        device: ``"auto"`` takes the GPU that Spark granted the task, or the only one there is; else torch's name.
        threads: intra-op threads of a task; None takes ``spark.task.cpus``.
    """

    batch_rows: int = 4096
    nulls: str = "error"
    vectors: bool = False
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        _check_whole(self, "batch_rows", "threads")
        require(self.batch_rows >= 1, f"batch_rows={self.batch_rows} is below 1: give the rows of one batch, e.g. 4096")
        _check_choice(self, "nulls", "error", "null", "nan")
        require(
            self.threads is None or self.threads >= 1,
            f"threads={self.threads} is below 1: leave it out to use spark.task.cpus",
        )
