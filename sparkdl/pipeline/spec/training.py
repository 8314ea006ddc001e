"""The sections of a pipeline file that say how a model comes about: model, train, search.

Names, defaults, descriptions and bounds of ``train`` are those of the estimator's parameters: its table is the only
place that holds them.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from sparkdl.errors import ConfigError
from sparkdl.estimator.params.spec import SPECS
from sparkdl.pipeline.spec.base import Count, Function, Natural, Positive, Section, Wrong, doc
from sparkdl.pipeline.spec.source import Scalar

_PARAMETERS = {spec.name: spec for spec in SPECS}
RULES = {
    "epochs": "so many that 600,000 rows are read, from 6 to 16, or to 20 of several classes judged by accuracy; of "
    "few up to 60, until 100,000 are read in 600 steps",
    "batch_size": "16 to 512 by all ranks together: a 40th of few training rows, 64 of some thousand, a 128th of many",
    "learning_rate": "0.005 for the default network, 0.016 of several classes judged by accuracy; 0.001 for another",
    "warmup_steps": "a twentieth of all steps, 200 at most",
    "decay": "cosine, to 0 at the last step",
    "early_stopping_patience": "a quarter of the epochs, 4 at least",
    "monitor": "val_accuracy of several classes that are judged by accuracy, else val_loss",
    "num_proc": "one for each 64 rows of a step, in the slots that there are; all slots for a network of your own, or "
    "with strategy, min_num_proc or gradient_compression",
}
"""What holds for names in ``train`` that the file leaves out: ``pipeline/recipe.py`` applies it."""


class Model(Section, frozen=True, kw_only=True):
    """The network. Left out: an ensemble of small ones over embeddings of categories and of numbers."""

    short = "factory"

    factory: Annotated[
        Function | None, doc("A function (features, **arguments) -> torch.nn.Module, as module:function.")
    ] = None
    arguments: Annotated[
        dict[str, Any], doc("Its arguments, by name; without a factory, those of the default model.")
    ] = field(default_factory=dict)


def _of(name: str, effect: str = "") -> Meta:
    description = effect or f"{_PARAMETERS[name].effect} ({_PARAMETERS[name].unit})"
    return doc(f"{description} Left out: {RULES[name]}." if name in RULES else description)


def _default(name: str) -> Any:
    return _PARAMETERS[name].default


class Train(Section, frozen=True, kw_only=True):
    """How the model is trained: the parameters of TorchEstimator, by their names, and the optimizer.

    What is None in ``RULES`` follows from the number of training rows once these are known.
    """

    epochs: Annotated[int | None, _of("epochs")] = None
    batch_size: Annotated[int | None, _of("batch_size")] = None
    optimizer: Annotated[
        str,
        Meta(
            pattern=r"^(adamw|adam|sgd|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
            examples=["adamw", "mypackage.module:function"],
            description="adamw, adam or sgd, or module:function, a function of yours from the model to an optimizer.",
        ),
    ] = "adamw"
    learning_rate: Annotated[
        Positive | None, _of("learning_rate", "Of the optimizer, after the warm-up; not for a function of yours.")
    ] = None
    weight_decay: Annotated[
        Annotated[float, Meta(ge=0)] | None, doc("Of the optimizer; its own default if left out.")
    ] = None
    warmup_steps: Annotated[
        Natural | None, _of("warmup_steps", "Steps over which the learning rate rises from 0 to its height.")
    ] = None
    decay: Annotated[
        Literal["none", "cosine", "linear"] | None,
        _of("decay", "How the learning rate falls to 0 until the last step, after the warm-up."),
    ] = None
    start: Annotated[
        Literal["scratch", "champion"],
        doc("Train from scratch, or go on from the champion's weights on the new window."),
    ] = "scratch"
    val_batch_size: Annotated[int | None, _of("val_batch_size")] = _default("val_batch_size")
    train_steps_per_epoch: Annotated[int | None, _of("train_steps_per_epoch")] = _default("train_steps_per_epoch")
    validation_steps_per_epoch: Annotated[int | None, _of("validation_steps_per_epoch")] = _default(
        "validation_steps_per_epoch"
    )
    random_seed: Annotated[int | None, _of("random_seed")] = _default("random_seed")
    shuffle: Annotated[bool, _of("shuffle")] = _default("shuffle")
    shuffle_buffer_size: Annotated[int | None, _of("shuffle_buffer_size")] = _default("shuffle_buffer_size")
    precision: Annotated[Literal["fp32", "bf16", "fp16"], _of("precision")] = _default("precision")
    max_grad_norm: Annotated[float | None, _of("max_grad_norm")] = _default("max_grad_norm")
    scale_lr: Annotated[bool, _of("scale_lr")] = _default("scale_lr")
    sync_batch_norm: Annotated[bool | None, _of("sync_batch_norm")] = _default("sync_batch_norm")
    early_stopping_patience: Annotated[
        Natural | None,
        _of(
            "early_stopping_patience",
            "Stop after this many epochs without improvement, with the best epoch's weights; 0 trains to the end and "
            "keeps the last epoch's.",
        ),
    ] = None
    monitor: Annotated[str | None, _of("monitor")] = None
    metrics: Annotated[tuple[str, ...], _of("metrics")] = ()
    compile: Annotated[bool | str, _of("compile")] = _default("compile")
    num_proc: Annotated[int | None, _of("num_proc", "Number of ranks.")] = None
    min_num_proc: Annotated[int | None, _of("min_num_proc")] = _default("min_num_proc")
    backend: Annotated[Literal["auto", "horovod", "torch"], _of("backend")] = _default("backend")
    strategy: Annotated[str, _of("strategy")] = _default("strategy")
    gradient_compression: Annotated[str | None, _of("gradient_compression")] = _default("gradient_compression")
    use_gpu: Annotated[bool, _of("use_gpu")] = _default("use_gpu")
    checkpoint_every: Annotated[int | None, _of("checkpoint_every")] = _default("checkpoint_every")
    keep_checkpoints: Annotated[int, _of("keep_checkpoints")] = _default("keep_checkpoints")
    max_failures: Annotated[int, _of("max_failures")] = _default("max_failures")
    timeout: Annotated[float | None, _of("timeout")] = _default("timeout")
    spread_rows: Annotated[bool, _of("spread_rows")] = _default("spread_rows")
    partitions_per_process: Annotated[int | None, _of("partitions_per_process")] = _default("partitions_per_process")
    train_reader_num_workers: Annotated[int | None, _of("train_reader_num_workers")] = _default(
        "train_reader_num_workers"
    )
    val_reader_num_workers: Annotated[int | None, _of("val_reader_num_workers")] = _default("val_reader_num_workers")
    transform_batch_size: Annotated[int, _of("transform_batch_size")] = _default("transform_batch_size")
    verbose: Annotated[int, _of("verbose")] = _default("verbose")
    baseline: Annotated[
        Literal["auto", "off"],
        doc(
            "auto trains LightGBM, where it is installed (sparkdl[boosting]), on the same rows and columns "
            "and shows its error beside the model's; it decides nothing. off leaves it out."
        ),
    ] = "auto"

    def _misfits(self) -> Iterator[Wrong]:
        for name, value in self._estimator_values().items():
            try:
                _PARAMETERS[name].converter(name, value)
            except ConfigError as refused:
                yield name, str(refused).removeprefix(name)
        for name in ("learning_rate", "weight_decay"):
            if getattr(self, name) is not None and ":" in self.optimizer:
                yield name, f"={getattr(self, name)} is not for {self.optimizer}, which sets its own: leave it out"

    @property
    def spreads(self) -> bool:
        """Whether the rows of shards lie in random order."""
        return self.spread_rows and self.shuffle and self.shuffle_buffer_size != 0

    def parameters(self) -> dict[str, Any]:
        """The estimator's parameters among them that are set, by name, but those by which shards are cut.

        The rest says how an optimizer is made.
        """
        return {name: value for name, value in self._estimator_values().items() if name not in _OF_SHARDS}

    def _estimator_values(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ESTIMATOR_NAMES}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value not in (None, ()) and (name, value) != ("early_stopping_patience", 0)
        }


_OF_SHARDS = ("partitions_per_process", "spread_rows")
ESTIMATOR_NAMES = tuple(name for name in Train.__struct_fields__ if name in _PARAMETERS and name != "optimizer")
"""The names in ``train`` that are handed to TorchEstimator as they are."""


NOT_DECIDING = (
    *("verbose", "timeout", "max_failures", "checkpoint_every", "keep_checkpoints"),
    *("train_reader_num_workers", "val_reader_num_workers", "transform_batch_size", "baseline"),
)
"""Names in ``train`` that leave the weights as they are."""


class Range(Section, frozen=True, kw_only=True):
    """Numbers between two limits, drawn at random."""

    low: Annotated[float, doc("The least.")]
    high: Annotated[float, doc("The greatest.")]
    log: Annotated[bool, doc("Draw evenly on a logarithmic scale.")] = False

    def _misfits(self) -> Iterator[Wrong]:
        if self.low >= self.high:
            yield "high", f"={self.high} is not above low={self.low}: give the lower limit first"
        if self.log and self.low <= 0:
            yield "low", f"={self.low} has no logarithm: give a number above 0, or leave log out"


class Search(Section, frozen=True, kw_only=True):
    """Several settings, of which the best by publish.metric on the validation rows becomes the challenger.

    The loss chooses where a training does not compute that metric: of several labels unless train.metrics names it, and
    of classes with a loss of your own.
    """

    space: Annotated[
        dict[str, tuple[Scalar | None, ...] | Range],
        Meta(
            min_length=1,
            description="By train.NAME or model.ARGUMENT: a list of values or, but for grid, {low, high, log}.",
            examples=[{"train.learning_rate": [0.001, 0.01]}],
        ),
    ]
    method: Annotated[
        Literal["grid", "random", "halving", "tpe"],
        doc(
            "grid tries all combinations, random draws trials of them, halving stops the worse of those "
            "early (ASHA), tpe draws each by what those before came to (Optuna)."
        ),
    ] = "grid"
    trials: Annotated[Count | None, doc("How many settings are drawn where grid does not list them.")] = None
    min_epochs: Annotated[Count, doc("With halving, epochs before a trial is looked at first.")] = 1
    reduction: Annotated[int, doc("With halving, one of how many goes on, to so many times as many epochs.", ge=2)] = 3
    slots: Annotated[
        Count | None,
        doc(
            "Slots of the cluster that trials side by side may fill; all of them by default. Each trial "
            "takes train.num_proc of them, one if that is left out."
        ),
    ] = None
    seed: Annotated[Natural, doc("Of what is drawn.")] = 0

    def _misfits(self) -> Iterator[Wrong]:
        if self.method != "grid" and self.trials is None:
            yield "trials", f" is missing: say how many settings {self.method} draws"
        if self.method == "grid" and self.trials is not None:
            yield "trials", f"={self.trials} is for methods that draw, and grid tries all combinations: leave it out"
        for name, default in (("min_epochs", 1), ("reduction", 3)):
            value = getattr(self, name)
            if self.method != "halving" and value != default:
                yield name, f"={value} is for method 'halving', and method is {self.method!r}: leave it out"
        if self.method == "halving" and "train.epochs" in self.space:
            yield "space.train.epochs", " is what halving itself varies: leave it out, and set train.epochs"
        for name, values in self.space.items():
            if not values:
                yield f"space.{name}", " is empty: give at least one value"
            elif isinstance(values, Range) and self.method == "grid":
                yield f"space.{name}", " is a range, and method is 'grid': give a list of values, or choose random"
