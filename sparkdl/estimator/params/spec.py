"""All parameters in one table; ``python -m sparkdl.estimator.params.spec`` writes ``PARAMETERS.md`` from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.estimator.params import converters as c

HOROVOD, SPARK, OURS = "Horovod", "Spark ML", "sparkdl"


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter.

    Attributes:
        name: as it is written in ``TorchEstimator(name=...)``.
        default: what holds when it is not given, or given as None.
        unit: of a number; what kind of value otherwise.
        effect: what it does, in one sentence.
        peer: the library whose code uses this name.
        converter: checks a value and brings it into one form.
        accessor: ``X`` of ``setX`` and ``getX``; empty makes it from the name.
        json: whether its value can be written as JSON; the others are saved as files beside the metadata.
    """

    name: str
    default: Any
    unit: str
    effect: str
    peer: str
    converter: c.Converter
    accessor: str = ""
    json: bool = True

    @property
    def suffix(self) -> str:
        """``X`` of ``setX`` and ``getX``."""
        if self.accessor:
            return self.accessor
        return "".join(part[:1].upper() + part[1:] for part in self.name.split("_"))


def _horovod(name: str, default: Any, unit: str, converter: c.Converter, effect: str, **more: Any) -> ParamSpec:
    return ParamSpec(name, default, unit, effect, HOROVOD, converter, **more)


def _spark(name: str, default: Any, unit: str, converter: c.Converter, effect: str, **more: Any) -> ParamSpec:
    return ParamSpec(name, default, unit, effect, SPARK, converter, **more)


def _ours(name: str, default: Any, unit: str, converter: c.Converter, effect: str, **more: Any) -> ParamSpec:
    return ParamSpec(name, default, unit, effect, OURS, converter, **more)


# fmt: off
_WHAT = (
    _horovod("model", None, "torch.nn.Module", c.model, json=False,
          effect="The model to train; it is copied, never trained in place."),
    _horovod("optimizer", None, "optimizer or function", c.optimizer, json=False,
          effect="An optimizer bound to the model's parameters (its groups and state travel with the model), or a"
          " function"
          " from the model to one."),
    _horovod("loss", None, "function or list", c.loss_or_losses, json=False,
          effect="Loss of (output, label); a list gives one a label."),
    _horovod("loss_constructors", None, "list of functions", c.functions, json=False,
          effect="Functions that make the losses on the ranks; instead of loss."),
    _horovod("loss_weights", None, "list of numbers", c.numbers_list,
          effect="Weight of each label's loss in the sum; equal parts of 1 by default."),
    _horovod("metrics", None, "name or list", c.metrics, json=False,
          effect="Names, torchmetrics objects, or functions of (output, label), each over all rows of all ranks,"
          " unweighted. Names: mse, rmse, mae, mape, r2 of values; accuracy, precision, recall, f1, auc,"
          " average_precision, log_loss of classes: of class 1 where there are two, else averages of the classes."
          " They know from the loss what outputs mean, and keep sums alone, but for auc and average_precision, which"
          " keep each row's probabilities. A function is called once with the outputs and labels of all rows. What is"
          " kept of rows may fill 256 MiB a rank."),
    _horovod("callbacks", None, "list", c.callbacks, json=False,
          effect="Hooks of the training loop, called on every rank."),
    _horovod("train_minibatch_fn", None, "function", c.function, json=False,
          effect="Trains one batch: owns zero_grad, backward and step of the optimizer; takes Horovod's arguments."),
    _ours("lr_scheduler", None, "function", c.scheduler, json=False,
          effect="From the optimizer to a scheduler of torch.optim.lr_scheduler; stepped once an epoch, or once a"
          " step if "
          "the function's attribute per_step is True."),
    _ours("scale_lr", False, "boolean", c.boolean,
          effect="Multiply the learning rate by the number of ranks; Horovod does so unasked."),
)
# fmt: on

# fmt: off
_COLUMNS = (
    _horovod("feature_cols", None, "list of columns", c.columns,
          effect="Input columns; numbers pack into one (batch, n) tensor unless input_shapes is given. Arrays whose"
          " rows all have one length are fixed at it; those that differ reach forward as its parameters name them:"
          " `<column>_mask`, `<column>_lengths`, `<column>_offsets` or `<column>_jagged`."),
    _horovod("label_cols", None, "list of columns", c.columns,
          effect="Label columns, one for each output of the model."),
    _horovod("sample_weight_col", None, "column", c.column,
          effect="Weight w of each row in the loss: sum(w * loss) / sum(w) over the global batch, and with class "
          "weights c of a cross entropy sum(w * c * loss) / sum(w * c)."),
    _horovod("continuous_cols", None, "list of columns", c.columns,
          effect="Number columns that pack into one floating-point tensor of their own."),
    _horovod("categorical_cols", None, "list of columns", c.columns,
          effect="Id columns that pack into one int64 tensor of their own, for embeddings."),
    _horovod("input_shapes", None, "list of shapes", c.shapes,
          effect="Shape of each feature column's tensor, batch first as -1, or the shape of a row without it; each"
          " column becomes one input of the model. [-1, -1] is an array whose rows differ in length."),
    _horovod("label_shapes", None, "list of shapes", c.shapes,
          effect="Shape of each label's tensor, batch first as -1; by default that of the output when the sizes"
          " agree."),
    _horovod("validation", None, "fraction or column", c.validation,
          effect="Rows to validate on: a share chosen by a hash of the row and random_seed, or those whose column is"
          " true "
          "or above 0."),
    _ours("feature_dtypes", None, "dict column to dtype", c.dtypes,
          effect="Dtype of a column's tensor; by default floats take the model's dtype and integers stay integers."),
    _horovod("transformation_fn", None, "function", c.function, json=False,
          effect="From a pandas DataFrame to one, applied once, while shards are written."),
    _horovod("transformation_edit_fields", None, "list of 4-tuples", c.edit_fields, json=False,
          effect="(name, numpy dtype, shape, nullable) of each column that transformation_fn adds or changes."),
    _horovod("transformation_removed_fields", None, "list of columns", c.columns,
          effect="Columns that transformation_fn removes."),
    _spark("featuresCol", "features", "column", c.column,
          effect="One feature column, where feature_cols is not given."),
    _spark("labelCol", "label", "column", c.column,
          effect="One label column, where label_cols is not given."),
    _spark("weightCol", None, "column", c.column,
          effect="The same as sample_weight_col."),
    _spark("validationIndicatorCol", None, "column", c.column,
          effect="The same as validation with a column."),
    _spark("predictionCol", None, "column", c.column,
          effect="Output column in Spark's sense, instead of label__output: the class as double where the loss is"
          " CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss or BCELoss, or derived from one; the output itself, and no"
          " class, with any other: with your own function, too, even if it computes one of these."),
    _spark("probabilityCol", None, "column", c.column,
          effect="Probability of each class as a vector column; needs one of the losses of predictionCol."),
    _spark("rawPredictionCol", None, "column", c.column,
          effect="What probabilities are made of, as a vector column: the outputs; of one, [-x, x]."),
    _spark("outputCols", None, "list of columns", c.columns,
          effect="Output columns of the fitted model, one a label; label__output by default."),
)
# fmt: on

# fmt: off
_LOOP = (
    _horovod("batch_size", 32, "rows a rank and step", c.integer(1),
          effect="Rows that one rank takes in one step."),
    _horovod("val_batch_size", None, "rows a rank and step", c.integer(1),
          effect="The same for validation; batch_size by default."),
    _horovod("epochs", 1, "epochs", c.integer(1),
          effect="Passes over the training rows."),
    _horovod("train_steps_per_epoch", None, "steps", c.integer(1),
          effect="Stop an epoch after this many steps; all rows by default."),
    _horovod("validation_steps_per_epoch", None, "steps", c.integer(1),
          effect="Stop a validation after this many steps; all rows by default."),
    _horovod("backward_passes_per_step", 1, "batches", c.integer(1),
          effect="Batches whose mean gradient makes one optimizer step; handed to train_minibatch_fn, which decides."),
    _horovod("random_seed", None, "integer", c.integer(0, 2**63 - 1),
          effect="Seed of the order of rows, of the validation split and of dropout; 0 by default."),
    _horovod("shuffle", True, "boolean", c.boolean,
          effect="Take the rows in a new random order each epoch."),
    _ours("precision", "fp32", "fp32, bf16, fp16", c.anything_in("fp32", "bf16", "fp16"),
          effect="Autocast of the forward pass; fp16 with a gradient scaler."),
    _ours("max_grad_norm", None, "norm", c.number(0, exclusive=True),
          effect="Clip the gradient of the global batch to this norm."),
    _ours("sync_batch_norm", None, "boolean", c.boolean,
          effect="Statistics of batch norm layers run over the rows of all ranks, as on one rank; by default wherever "
          "the model has such layers. False is faster (a step of ResNet-18 on 2 ranks of a core each: 1.2 s instead of "
          "1.6), and N ranks then train another model than one."),
    _ours("early_stopping_patience", None, "epochs", c.integer(1),
          effect="Stop after this many epochs without improvement, with the best epoch's weights."),
    _ours("monitor", None, "metric", c.column,
          effect="What epochs are compared by; val_loss, or loss without validation."),
    _ours("monitor_mode", "auto", "auto, min, max", c.anything_in("auto", "min", "max"),
          effect="Whether less or more of monitor is better. auto takes what the metric says of itself; a function "
          "says nothing."),
    _ours("compile", False, "boolean or mode", c.compile_mode,
          effect="Run the model through torch.compile."),
    _horovod("verbose", 1, "0, 1, 2", c.integer(0),
          effect="0 is silent, 1 shows progress, 2 also every rank's output."),
)
# fmt: on

# fmt: off
_RUN = (
    _horovod("num_proc", None, "ranks", c.integer(1),
          effect="Number of ranks; every slot of the cluster by default."),
    _horovod("backend", "auto", "name or SparkBackend", c.backend, json=False,
          effect="Collective: horovod or torch, whose all-reduce then carries the gradients; auto takes shared memory "
          "and torch on the CPUs of one host, elsewhere horovod where it is installed; a SparkBackend with "
          "num_proc, env and the options of run; or a backend of your own, whose run() is called."),
    _ours("strategy", "all_reduce", "name", c.strategy,
          effect="How the model is spread over the ranks: all_reduce (a copy on each), zero1, zero2, fsdp (optimizer "
          "state, gradients, parameters cut), tensor (layers cut by columns and rows), pipeline (stages), expert "
          "(experts of sparkdl.nn.MixtureOfExperts), or a mesh of these, 'mesh(data=2, pipeline=2)' or sparkdl.Mesh, "
          "which go by torch.distributed, so that backend=auto takes it; local_sgd, diloco (steps of each rank by "
          "itself), or 'parameter_server(servers=1, staleness=0)' (parameters on servers), over any backend. "
          "batch_size counts for each rank that reads rows of its own; those of one tensor group or pipeline read the "
          "same. auto lets the ranks measure the model, which must fit one of them, and their links for some seconds, "
          "takes what is fastest by estimate and says why; a step has batch_size times num_proc rows then, whatever is "
          "taken."),
    _horovod("gradient_compression", None, "fp16, bf16, powersgd(rank=4), topk(keep=0.01), adasum, none", c.compression,
          effect="Send less than gradients are: halves of float32; products of a few vectors, or the largest numbers "
          "alone, each with what was not sent added to the next gradient. adasum sends them whole and joins them "
          "otherwise than by their mean. All but fp16 and bf16 train another model than one rank does."),
    _horovod("use_gpu", True, "boolean", c.boolean,
          effect="Compute on the GPUs that Spark assigns to the ranks; without any, on the CPU."),
    _horovod("store", None, "path, URI or Store", c.store, json=False,
          effect="Where shards, checkpoints and logs lie, reachable from every worker; a temporary folder by default."),
    _horovod("run_id", None, "name", c.column,
          effect="Name of the run in the store; what a run of that name has left there is continued as resume says."),
    _ours("resume", "exact", "exact, warm, never", c.anything_in("exact", "warm", "never"),
          effect="What a fit makes of the checkpoints of its run_id. exact: go on from the newest as if the run had "
          "never ended; other data, model or settings are refused by name. warm: start from the newest one's weights, "
          "with optimizer, schedule, epochs and history afresh, on new data or settings; refused if there is none, or "
          "it does not fit the model. never: refused if there are any."),
    _ours("checkpoint_every", None, "steps", c.integer(1),
          effect="Optimizer steps between checkpoints; with a store, one an epoch by default."),
    _ours("keep_checkpoints", 3, "checkpoints", c.integer(1),
          effect="How many of the newest checkpoints are kept, plus the best."),
    _ours("max_failures", 0, "attempts", c.integer(0),
          effect="Failed attempts after which fit gives up; each new attempt goes on from this fit's last "
          "checkpoint, whatever resume says."),
    _ours("min_num_proc", None, "ranks", c.integer(1),
          effect="After a failure go on with as few ranks as this if slots stay away for 10 s; num_proc by default."),
    _ours("timeout", None, "seconds", c.number(0, exclusive=True),
          effect="How long a fit may wait for slots and for its ranks to start; 600 by default."),
    _ours("transform_batch_size", 4096, "rows", c.integer(1),
          effect="Rows that the fitted model scores at once; bounds its memory."),
)
# fmt: on

# fmt: off
_READER = (
    _horovod("partitions_per_process", None, "partitions a rank", c.integer(1),
          effect="Repartition the DataFrame to this many partitions a rank before shards are written; left as it is by "
          "default."),
    _ours("spread_rows", True, "boolean", c.boolean,
          effect="Put the rows in random order over the whole set when shards are written, so that a sorted table "
          "trains the model that a shuffled one trains. False saves the time where they are in random order already; "
          "shuffle=False keeps the order of the frame."),
    _horovod("train_reader_num_workers", None, "threads", c.integer(1), accessor="TrainReaderNumWorker",
          effect="Threads that read ahead for training."),
    _horovod("val_reader_num_workers", None, "threads", c.integer(1), accessor="ValReaderNumWorker",
          effect="Threads that read ahead for validation."),
    _horovod("reader_pool_type", "thread", "thread",
          converter=c.only("thread", "rows are read by threads; see train_reader_num_workers"),
          effect="Only thread is taken, Horovod's default."),
    _horovod("compress_sparse_cols", False, "boolean", c.boolean,
          effect="Compress shards with zstd: fewer bytes for sparse vectors, more work to read."),
    _horovod("inmemory_cache_all", False, "boolean", accessor="InMemoryCacheAll",
          converter=c.only(False, "local shards are mapped into memory, remote ones are cached on the local disk"),
          effect="Only False is taken, Horovod's default."),
    _horovod("shuffle_buffer_size", None, "rows", c.integer(0), accessor="ShufflingBufferSize",
          effect="Rows that are shuffled among each other at a time; 0 is shuffle=False; 64 MiB of rows by default."),
    _horovod("mp_start_method", None, "-",
          converter=c.refused("leave it out: ranks run inside Spark's Python workers and"
                              " start no process"), effect="Refused."),
    _horovod("data_module", None, "-",
          converter=c.refused("leave it out: rows are read from sparkdl's own shards; use"
                              " fit_on_shards for data of your own"), effect="Refused."),
)
# fmt: on

SPECS: tuple[ParamSpec, ...] = _WHAT + _COLUMNS + _LOOP + _RUN + _READER
"""Every parameter of ``TorchEstimator``."""

ALIASES = {
    "feature_cols": "featuresCol",
    "label_cols": "labelCol",
    "sample_weight_col": "weightCol",
    "validation": "validationIndicatorCol",
}
"""Horovod's name to Spark's name for the same thing; giving both is a conflict."""

_MODEL_NAMES = {
    "input_shapes",
    "outputCols",
    "predictionCol",
    "probabilityCol",
    "rawPredictionCol",
    "run_id",
    "transform_batch_size",
}

# fmt: off
MODEL_SPECS: tuple[ParamSpec, ...] = (
    _horovod("feature_columns", None, "list of columns", c.columns,
             effect="Input columns, as in training; other names are read in their place, by position."),
    _horovod("label_columns", None, "list of columns", c.columns,
             effect="Label columns, as in training; other names are those of the predictions, by position."),
    *(spec for spec in SPECS if spec.name in _MODEL_NAMES),
)
# fmt: on
"""Every parameter of ``TorchModel`` that is plain data; model, optimizer, loss and history are attributes."""


PAGE = Path(__file__).parents[1] / "PARAMETERS.md"

_INTRODUCTION = """# Parameters of TorchEstimator and TorchModel

Written by `python -m sparkdl.estimator.params.spec`; do not edit. "Peer" says whose code uses the name:
Horovod's TorchEstimator, Spark ML, or sparkdl itself. A value of None means the default. What is refused raises a
`ConfigError` that names what to use instead.
"""


def render() -> str:
    """Return the whole page."""
    alias_lines = "\n".join(f"- `{ours}` or `{alias}`: giving both is an error." for ours, alias in ALIASES.items())
    return (
        f"{_INTRODUCTION}\n## TorchEstimator\n\n{_table(SPECS)}\n"
        f"### Two names for one thing\n\n{alias_lines}\n\n## TorchModel\n\n{_table(MODEL_SPECS)}"
    )


def write() -> Path:
    """Write the page beside this file; return its path."""
    PAGE.write_text(render(), encoding="utf-8")
    return PAGE


def _table(specs: Iterable[ParamSpec]) -> str:
    lines = ["| parameter | default | unit or kind | effect | peer |", "|---|---|---|---|---|"]
    for spec in specs:
        cells = (f"`{spec.name}`", f"`{spec.default!r}`", spec.unit, spec.effect, spec.peer)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(write())
