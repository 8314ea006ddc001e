"""The ride-duration network: an embedding table for each categorical, an MLP on top.

Enters: standardised numerics and ids. Leaves: expected minutes. ``build_model`` is the factory that a published model
names; its keyword arguments are JSON values, so that no code travels with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from jobs.features import CATEGORICAL, LABEL, NUMERIC, Statistics
from jobs.settings import ModelSettings
from sparkdl.errors import ConfigError

__all__ = ["RideModel", "build_model", "model_kwargs"]


class RideModel(nn.Module):
    """Embeddings and numerics, joined, through an MLP to one number.

    Args:
        embedding_rows: rows of each table, in the order of the id columns.
        embedding_width: width of each table.
        numerics: number of numeric columns.
        hidden: widths of the hidden layers.
        label_mean, label_scale: the network learns the label standardised by these, and returns minutes.
    """

    label_mean: torch.Tensor
    label_scale: torch.Tensor

    def __init__(
        self,
        embedding_rows: Sequence[int],
        embedding_width: Sequence[int],
        numerics: int,
        hidden: Sequence[int],
        label_mean: float = 0.0,
        label_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(rows, width) for rows, width in zip(embedding_rows, embedding_width, strict=True)
        )
        for table in self.tables.parameters():  # N(0, 1), PyTorch's default, would drown the numerics at the start
            nn.init.normal_(table, std=0.1)
        layers: list[nn.Module] = []
        width = sum(embedding_width) + numerics
        for each in hidden:
            layers += [nn.Linear(width, each), nn.SiLU()]
            width = each
        self.mlp = nn.Sequential(*layers, nn.Linear(width, 1))
        self.register_buffer("label_mean", torch.tensor(float(label_mean)))
        self.register_buffer("label_scale", torch.tensor(float(label_scale)))

    def forward(self, numerics: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return expected minutes, ``(batch,)``.

        Args:
            numerics: standardised, ``(batch, numerics)``, in the order of ``jobs.features.NUMERIC``.
            ids: integers, ``(batch, categoricals)``, in the order of ``jobs.features.CATEGORICAL``; 0 is unknown.
        """
        columns = ids.long().unbind(dim=1)
        joined = [table(column) for table, column in zip(self.tables, columns, strict=True)]
        standardised = self.mlp(torch.cat([numerics, *joined], dim=1)).squeeze(1)
        return torch.addcmul(self.label_mean, standardised, self.label_scale)


def build_model(**kwargs: Any) -> RideModel:
    """Build the network from JSON values: the factory that bundles name as ``jobs.model:build_model``."""
    return RideModel(**kwargs)


def model_kwargs(settings: ModelSettings, statistics: Statistics) -> dict[str, Any]:
    """Return the keyword arguments of ``build_model``, as JSON values.

    Raises:
        ConfigError: a categorical has no embedding table, or a table has no categorical.
    """
    rows = settings.embedding_rows
    for given in (rows, settings.embedding_width):
        unknown = sorted(set(given) - set(CATEGORICAL))
        if unknown:
            raise ConfigError(
                f"model has a table for {unknown[0]!r}, the features have {', '.join(CATEGORICAL)}: remove it"
            )
    missing = [name for name in CATEGORICAL if name not in rows]
    if missing:
        raise ConfigError(
            f"model.embedding_rows has {len(rows)} tables and none for {missing[0]!r}: set "
            f"--set.model.embedding_rows.{missing[0]}=ROWS"
        )
    return {
        "embedding_rows": [rows[name] for name in CATEGORICAL],
        "embedding_width": [_width(name, rows, settings.embedding_width) for name in CATEGORICAL],
        "numerics": len(NUMERIC),
        "hidden": list(settings.hidden),
        "label_mean": statistics.mean(LABEL),
        "label_scale": statistics.scale(LABEL),
    }


def _width(name: str, rows: Mapping[str, int], given: Mapping[str, int]) -> int:
    """Width of a table: as given, or growing with the root of its rows, 4 to 16."""
    return given.get(name) or max(4, min(16, round(4 * (rows[name] / 8) ** 0.5)))
