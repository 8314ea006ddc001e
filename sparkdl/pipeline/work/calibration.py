"""What a trained model's outputs become: quantiles in order, amounts, probabilities that validation rows calibrate.

The temperature is the one number by which all logits are divided (Guo et al. 2017, "On Calibration of Modern Neural
Networks", section 4.2): it moves no row past another of two classes, and no class past another.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.metrics.rows import Floats
from sparkdl.models.folder import Adjustment
from sparkdl.models.signature import Signature
from sparkdl.pipeline.recipe import calibrates
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.work.evaluate import numbers
from sparkdl.pipeline.work.labels import Labels
from sparkdl.scoring.rows import score_rows

if TYPE_CHECKING:
    from sparkdl.estimator.model import TorchModel

MOST_ROWS = 200_000
"""Validation rows that a temperature is fitted to; one number needs no more."""
_BATCH = 8_192
_LOWEST, _HIGHEST = 0.05, 50.0


def adjustments_of(model: TorchModel, spec: PipelineSpec, labels: Labels, validate: str) -> tuple[Adjustment, ...]:
    """What is made of the outputs of a trained model, one adjustment a label; none where the file asks for none.

    Args:
        model: that was trained.
        spec: the pipeline.
        labels: of its outputs, in order.
        validate: address of the validation shards.
    """
    temperatures = _temperatures(model, spec, labels, validate)
    if not temperatures and not any(label.levels or label.ceiling for label in labels):
        return ()
    return tuple(
        Adjustment(
            output=label.name,
            temperature=temperatures.get(label.name, 1.0),
            ascending=bool(label.levels),
            mean=None if label.ceiling is None else label.mean,
            ceiling=label.ceiling,
        )
        for label in labels
    )


def _temperatures(model: TorchModel, spec: PipelineSpec, labels: Labels, validate: str) -> dict[str, float]:
    """The temperature of each label that is to be calibrated."""
    calibrated = [position for position, label in enumerate(labels) if calibrates(spec, label.name)]
    if not calibrated:
        return {}
    signature, names = model.signature, [*labels.names, *([spec.weight] if spec.weight else [])]
    assert signature is not None
    outputs: list[pa.Table] = []
    truths: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for batch in itertools.islice(ShardedDataset(validate).loader(batch_size=_BATCH), -(-MOST_ROWS // _BATCH)):
        outputs.append(score_rows(model.getModel(), _inputs(batch, signature), signature=signature))
        for name in names:
            truths[name].append(batch[name].reshape(-1))
    scored = pa.concat_tables(outputs)
    true_values = {name: torch.cat(values).double().numpy() for name, values in truths.items()}
    weights = true_values[spec.weight] if spec.weight else np.ones(scored.num_rows)
    temperatures = {}
    for position in calibrated:
        label, logits = labels.labels[position], numbers(scored.column(position))
        if label.type == "binary":  # the model says the log-odds
            logits = np.stack([np.zeros(len(logits)), logits.reshape(len(logits))], axis=1)
        temperatures[label.name] = temperature_of(logits, true_values[label.name], weights)
    return temperatures


def _inputs(batch: dict[str, torch.Tensor], signature: Signature) -> pa.Table:
    """The inputs of a batch as columns: padded ones as lists."""
    columns: dict[str, pa.Array] = {}
    for name in signature.columns:
        values, valid = batch[name], batch.get(f"{name}__valid")
        flat = values.reshape(len(values), -1)
        if valid is None:
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1).numpy()), flat.shape[1])
        else:
            offsets = np.concatenate([[0], np.cumsum(valid.sum(1).numpy())]).astype(np.int32)
            columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values[valid].numpy()))
    return pa.table(columns)


def temperature_of(logits: Floats, labels: Floats, weights: Floats) -> float:
    """The temperature that makes labels most likely, between 0.05 and 50.

    Where every row is right, the likelihood grows without end as the temperature falls, to probabilities of 1 that no
    number of rows can show: labels are then as sure as that number makes them (Platt 1999, section 2.2), and nothing
    speaks for a temperature above 1.

    Args:
        logits: ``(rows, classes)``.
        labels: ``(rows,)`` numbers of classes.
        weights: ``(rows,)``.
    """
    from scipy.optimize import minimize_scalar  # not before it is asked for: it takes a moment to load
    from scipy.special import logsumexp

    chosen, counted = logits[np.arange(len(logits)), labels.astype(np.int64)], weights > 0
    highest = _HIGHEST
    if (chosen >= logits.max(axis=1))[counted].all():
        doubt, highest = 1 / (np.count_nonzero(counted) + 2), 1.0
        chosen = (1 - doubt) * chosen + doubt * logits.mean(axis=1)

    def loss(log_temperature: float) -> float:
        scale = np.exp(-log_temperature)
        return float(np.average(logsumexp(scale * logits, axis=1) - scale * chosen, weights=weights))

    minimum = minimize_scalar(loss, bounds=(np.log(_LOWEST), np.log(highest)), method="bounded")
    return float(np.exp(minimum.x))
