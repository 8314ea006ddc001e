"""What other libraries call a parameter that has another name here, or none.

Enters: a name that is no parameter. Leaves: what to write instead. A table knows what similar spelling does not:
``loader_num_epochs`` looks like ``val_reader_num_workers`` and has nothing to do with it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["advice"]

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
    plain = {_plain(one): one for one in names}
    if _plain(name) in plain:
        return f"it is spelt {plain[_plain(name)]}"
    for here, others in _RENAMED.items():
        if _plain(name) in map(_plain, others) and (here in names or "," in here):
            return f"use {here}"
    for other, remedy in _WITHOUT.items():
        if _plain(name) == _plain(other):
            return remedy
    near = difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
    return f"did you mean {near[0]}?" if near else "see explainParams() for the names there are"


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
