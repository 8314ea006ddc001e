"""Spark ``Param`` objects made from the table of ``spec.py``, with checked values and advice on other names."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params

from sparkdl.errors import ConfigError, LaunchTimeoutError, RankFailedError, SparkdlError
from sparkdl.estimator.params.spec import ALIASES, ParamSpec

_T = TypeVar("_T", bound="type[CheckedParams]")


class CheckedParams(Params):
    """Params that refuse unknown names, and read None as "the default"."""

    SPECS: tuple[ParamSpec, ...] = ()
    __signature__: inspect.Signature

    def setParams(self: Any, **params: Any) -> Any:
        """Set several parameters by name; None puts one back to its default.

        Raises:
            ConfigError: an unknown name, a value that its parameter does not take, or two names for one thing.
        """
        self._set(**params)
        check_conflicts(self)
        return self

    def copy(self: Any, extra: Any = None) -> Any:
        """Return a copy with the values of a param map.

        Raises:
            ConfigError: a key is no ``Param``, or a value is not what its parameter takes.
        """
        for key in extra or ():
            if not isinstance(key, Param):
                raise ConfigError(
                    f"the param map holds the key {key!r}, a {type(key).__name__}: give the Param, as in "
                    "{estimator.epochs: 3}"
                )
        return super().copy(extra)

    def set(self, param: Param[Any], value: Any) -> None:
        """Set one parameter of this instance.

        Raises:
            ConfigError: the parameter does not take the value.
        """
        self._shouldOwn(param)
        self._set(**{param.name: value})

    def _set(self: Any, **params: Any) -> Any:
        names = [spec.name for spec in self.SPECS]
        for name, value in params.items():
            if name not in names:
                raise ConfigError(f"{type(self).__name__} has no parameter {name!r}: {advice(name, names)}")
            if value is None:
                self._paramMap.pop(self.getParam(name), None)
            else:
                super()._set(**{name: value})
        return self


def check_conflicts(params: CheckedParams) -> None:
    """Refuse two names for one thing, and parameters that exclude one another.

    Raises:
        ConfigError: names both and says which to drop.
    """
    names = {spec.name for spec in params.SPECS}
    for ours, alias in ALIASES.items():
        if {ours, alias} <= names and params.isSet(ours) and params.isSet(alias):
            raise ConfigError(
                f"{ours}={params.getOrDefault(ours)!r} and {alias}={params.getOrDefault(alias)!r} name the same thing: "
                f"give one of the two"
            )
    if {"loss", "loss_constructors"} <= names and params.isSet("loss") and params.isSet("loss_constructors"):
        raise ConfigError("loss and loss_constructors are both given: drop one of the two")
    if {"outputCols", "predictionCol"} <= names and params.isSet("outputCols") and params.isSet("predictionCol"):
        output_names = params.getOrDefault("outputCols"), params.getOrDefault("predictionCol")
        raise ConfigError(
            f"outputCols={output_names[0]} and predictionCol={output_names[1]!r} both name the output: give one of the "
            "two"
        )


def value_of(params: CheckedParams, name: str) -> Any:
    """The value of ``name``, through Spark's name for it where only that one is set (a single column as a list)."""
    alias = ALIASES.get(name)
    if alias is None or params.isSet(name):
        return params.getOrDefault(name)
    value = params.getOrDefault(alias)
    return [value] if name in ("feature_cols", "label_cols") else value


def declare(specs: Iterable[ParamSpec]) -> Callable[[_T], _T]:
    """Class decorator: give a ``CheckedParams`` one ``Param``, one getter and one setter a spec, and a signature."""

    def decorate(cls: _T) -> _T:
        cls.SPECS = tuple(specs)
        for spec in cls.SPECS:
            doc = f"{spec.effect} ({spec.unit}; from {spec.peer})"
            setattr(cls, spec.name, Param(Params._dummy(), spec.name, doc, _converter(spec)))
            for accessor in (_getter(spec), _setter(spec)):
                if accessor.__name__ not in cls.__dict__:
                    setattr(cls, accessor.__name__, accessor)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(spec.name, keyword, default=spec.default) for spec in cls.SPECS]
        cls.__signature__ = inspect.Signature(parameters)
        return cls

    return decorate


def set_defaults(params: CheckedParams) -> None:
    """Give every parameter its default of the table."""
    params._setDefault(**{spec.name: spec.default for spec in params.SPECS})


def _converter(spec: ParamSpec) -> Callable[[Any], Any]:
    # Bound by default arguments: Spark copies Param objects, and the copy keeps this function.
    def convert(value: Any, name: str = spec.name, checked: Any = spec.converter) -> Any:
        return checked(name, value)

    return convert


def _getter(spec: ParamSpec) -> Callable[..., Any]:
    def get(self: CheckedParams, name: str = spec.name) -> Any:
        return value_of(self, name)

    get.__name__ = get.__qualname__ = f"get{spec.suffix}"
    get.__doc__ = f"Return {spec.name}: {spec.effect}"
    return get


def _setter(spec: ParamSpec) -> Callable[..., Any]:
    def set_value(self: CheckedParams, value: Any, name: str = spec.name) -> Any:
        return self._set(**{name: value})

    set_value.__name__ = set_value.__qualname__ = f"set{spec.suffix}"
    set_value.__doc__ = f"Set {spec.name}: {spec.effect}"
    return set_value


_RENAMED = {
    "epochs": ("n_epochs", "nepochs", "num_epochs", "max_epochs", "max_iter"),
    "batch_size": ("per_device_batch_size", "per_device_train_batch_size", "train_batch_size", "train_bs"),
    "val_batch_size": ("eval_batch_size", "validation_batch_size", "per_device_eval_batch_size"),
    "num_proc": ("np", "num_processes", "num_workers", "n_workers", "num_ranks", "world_size", "nproc_per_node"),
    "use_gpu": ("num_gpus", "gpus", "device", "accelerator", "use_cuda"),
    "random_seed": ("seed", "random_state"),
    "loss": ("loss_fn", "criterion", "loss_function", "objective"),
    "optimizer": ("lr", "learning_rate", "optimizer_fn", "optim", "weight_decay", "momentum"),
    "lr_scheduler": ("scheduler", "lr_schedule", "lr_scheduler_fn"),
    "feature_cols": ("features", "feature_columns", "features_cols", "input_cols", "inputs", "x_cols"),
    "featuresCol": ("features_col", "feature_col", "input_col"),
    "label_cols": ("labels", "label_columns", "labels_cols", "target_cols", "targets", "y_cols"),
    "labelCol": ("label", "target", "target_col", "labels_col"),
    "sample_weight_col": ("sample_weight", "weight_cols", "weights_col", "weight_column"),
    "validation": ("validation_split", "val_split", "validation_fraction", "eval_fraction"),
    "validationIndicatorCol": ("validation_col", "val_col"),
    "outputCols": ("output_columns", "output_col", "prediction_cols"),
    "train_minibatch_fn": ("training_step", "train_step", "train_fn"),
    "max_grad_norm": ("gradient_clip_val", "clip_grad_norm", "grad_clip", "clip_norm"),
    "backward_passes_per_step": ("accumulate_grad_batches", "gradient_accumulation_steps", "accumulate_steps"),
    "precision": ("mixed_precision", "amp", "fp16", "bf16", "use_amp"),
    "early_stopping_patience": ("patience", "early_stopping", "early_stopping_rounds"),
    "store": ("checkpoint_dir", "log_dir", "logs_dir", "default_root_dir", "work_dir"),
    "checkpoint_every": ("save_steps", "save_every", "checkpoint_interval"),
    "max_failures": ("max_restarts", "max_retries", "reset_limit"),
    "min_num_proc": ("min_np", "min_num_workers"),
    "train_reader_num_workers": ("train_reader_num_worker", "dataloader_num_workers", "num_data_workers"),
    "val_reader_num_workers": ("val_reader_num_worker",),
    "shuffle_buffer_size": ("shuffling_buffer_size",),
    "transform_batch_size": ("score_batch_size", "inference_batch_size", "predict_batch_size"),
    "num_proc, epochs and the others": ("trainer_args", "training_args", "fit_params"),
    "callbacks": ("callback", "logger", "loggers", "profiler", "log_every_n_steps"),
    "verbose": ("enable_progress_bar", "progress", "quiet", "debug_data_loader"),
    "timeout": ("start_timeout",),
}
_WITHOUT = {
    "loader_num_epochs": "leave it out: rows are read as often as epochs says",
    "terminate_on_nan": "leave it out: a loss that is not finite always ends the fit, with its step and rank",
    "mp_start_methods": "leave it out: ranks start no process",
    "inmemory_cache": "leave it out: local shards are mapped into memory",
    "history": "leave it out: the fitted model brings its history",
    "petastorm_reader": "leave it out: rows are read from sparkdl's own shards",
}
_NEAR = 0.8  # below it, similar spelling means nothing


def advice(name: str, known: Iterable[str]) -> str:
    """What to say of ``name``, which is none of the ``known`` parameters."""
    names = list(known)
    plain = {_plain(parameter): parameter for parameter in names}
    if _plain(name) in plain:
        return f"it is spelt {plain[_plain(name)]}"
    for our_name, foreign_names in _RENAMED.items():
        if _plain(name) in map(_plain, foreign_names) and (our_name in names or "," in our_name):
            return f"use {our_name}"
    for foreign_name, remedy in _WITHOUT.items():
        if _plain(name) == _plain(foreign_name):
            return remedy
    near = difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
    return f"did you mean {near[0]}?" if near else "see explainParams() for the names there are"


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


PARAMETER_OF = {
    "accumulate_steps": "backward_passes_per_step",
    "compression": "gradient_compression",
    "every_steps": "checkpoint_every",
    "keep_last": "keep_checkpoints",
    "log_to_driver": "verbose",
    "pool_bytes": "shuffle_buffer_size in bytes",
    "repartition": "partitions_per_process",
    "scheduler": "lr_scheduler",
    "scheduler_interval": "per_step of lr_scheduler",
    "seed": "random_seed",
    "start_timeout": "timeout",
    "start_timeout_seconds": "timeout",
    "steps_per_epoch": "train_steps_per_epoch",
    "tensorboard_dir": "logs of the store",
    "threads": "train_reader_num_workers or val_reader_num_workers",
    "uri": "store",
    "validation_batch_size": "val_batch_size",
    "validation_steps": "validation_steps_per_epoch",
}
"""The parameter that sets a field of a config, where they are called differently."""

_QUOTED = r"'[^']*'|\"[^\"]*\"|`[^`]*`"
_WORDS = {"compression", "repartition", "scheduler", "seed", "threads", "uri"}  # of English, too
_SET = "|".join(sorted(PARAMETER_OF.keys() - {"start_timeout"}, key=len, reverse=True))  # which a backend has as well
_MENTIONED = "|".join(sorted(PARAMETER_OF.keys() - _WORDS, key=len, reverse=True))
_NAMED = re.compile(rf"{_QUOTED}|(?<![\w./-])(?:({_SET})(?==| is )|({_MENTIONED})(?![\w./(=-]))")


def in_callers_names(text: str) -> str:
    """Return a message with the estimator's parameters in the place of fields; what is quoted stays as it is."""

    def renamed(found: re.Match[str]) -> str:
        field = found[1] or found[2]
        return PARAMETER_OF[field] if field else found[0]

    return _NAMED.sub(renamed, text)


@contextmanager
def callers_names() -> Iterator[None]:
    """Let errors of sparkdl leave the block in the names of the estimator's user."""
    try:
        yield
    except RankFailedError:
        raise  # quotes what the user's own code raised
    except SparkdlError as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (in_callers_names(error.args[0]), *error.args[1:])
        if isinstance(error, LaunchTimeoutError):
            error.message = in_callers_names(error.message)
        raise
