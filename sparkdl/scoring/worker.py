"""The scoring function of a Spark worker: Arrow batches in, the same rows with predictions out; no Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import torch
from torch import nn

from sparkdl.columns.batches import merge_small, split_evenly
from sparkdl.compat.heap import kept_heap
from sparkdl.config import ScoreConfig
from sparkdl.features.fitted import Features
from sparkdl.models.signature import Signature
from sparkdl.scoring.inputs import InputPlan, arguments_of
from sparkdl.scoring.models import ModelSource, loaded, place
from sparkdl.scoring.outputs import Kept, columns_of, kept_columns


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """The function that every Spark task of a scoring stage runs.

    Feature columns come packed, as ``transport.py`` says. At most ``batch_rows`` rows go through the model at once. It
    runs inside a Spark worker, and in a test without one.

    Attributes:
        source: of the model.
        signature: of the model.
        inputs: how its tensors are put together.
        columns: names of the output columns, one an output.
        kept: the caller's columns to pass on.
        config: batch size, nulls, device, threads.
        features: that make the inputs of raw columns, if the model has any.
        raw: the columns of these, in their order, as they are called in what Spark sends.
    """

    source: ModelSource
    signature: Signature
    inputs: tuple[InputPlan, ...]
    columns: tuple[str, ...]
    kept: tuple[Kept, ...]
    config: ScoreConfig
    features: Features | None = None
    raw: tuple[str, ...] = ()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Score what Spark sends, as one task: see ``score``."""
        with kept_heap():
            yield from self.score(batches)

    def score(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield ``kept`` and the outputs of each batch."""
        device, threads = place(self.config)
        torch.set_num_threads(threads)
        model: nn.Module | None = None
        names = [*(column.name for column in self.kept), *self.columns]
        for batch in merge_small(batches, self.config.batch_rows):
            if model is None:  # a task without rows loads nothing
                model = loaded(self.source, device)
            answers = [self._score(model, self._made(chunk), device) for chunk in split_evenly(batch, self._rows)]
            outputs = [pa.concat_arrays(parts) for parts in zip(*answers, strict=True)]
            # one batch out for one in: each costs Spark and Arrow a fixed time a column
            yield pa.RecordBatch.from_arrays([*kept_columns(batch, self.kept), *outputs], names=names)

    @property
    def _rows(self) -> int:
        """Rows that go through the model at once."""
        most = self.config.batch_rows
        return most if self.features is None else min(most, self.features.rows_at_once)

    def _made(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns of the signature."""
        if self.features is None:
            return batch
        raw = [batch.column(name) for name in self.raw]
        return self.features.apply(pa.RecordBatch.from_arrays(raw, list(self.features.columns)))

    def _score(self, model: nn.Module, batch: pa.RecordBatch, device: str) -> list[pa.Array]:
        """One column an output, for one batch."""
        arguments, missing = arguments_of(batch, self.signature, self.inputs, self.config.nulls, device)
        with torch.inference_mode():
            answer = model(*arguments.positional, **arguments.named)
        outputs = self.signature.outputs
        return columns_of(answer, outputs, batch.num_rows, missing, as_vectors=self.config.vectors)
