"""A DLRM (Naumov et al., 2019) and its optimizer, as the pipeline builds them from its features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim


class Dlrm(nn.Module):
    """Counts through a layer or two, one embedding a category, the dots of all of these: the logit of a click.

    Args:
        numbers: how many there are.
        cardinalities: how many ids each category has, the unknown 0 among them.
        width: of an embedding, and of what the counts become.
        bottom: widths of the layers between the counts and that.
        top: widths of the layers between the dots and the logit.

    Shape:
        - Input: ``{"numbers": (rows, numbers), "categories": (rows, categories)}``
        - Output: ``(rows, 1)``
    """

    def __init__(
        self, numbers: int, cardinalities: Sequence[int], width: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        vectors = len(cardinalities) + 1
        # One table for all categories, each in rows of its own: one lookup a batch, one sparse gradient to average.
        self.table = nn.Embedding(sum(cardinalities), width, sparse=True)
        nn.init.normal_(self.table.weight, std=0.05)
        self.register_buffer("first", torch.tensor([0, *cardinalities[:-1]]).cumsum(0), persistent=False)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)
        self.bottom = _layers(numbers, *bottom, width)
        self.top = _layers(width + vectors * (vectors - 1) // 2 + vectors - 1, *top, 1)
        self.alone = nn.Embedding(sum(cardinalities), 1, sparse=True)
        nn.init.zeros_(self.alone.weight)

    def forward(self, row: dict[str, Tensor]) -> Tensor:
        """See the class."""
        ids = row["categories"] + self.first
        dense = self.bottom(row["numbers"])
        vectors = torch.cat([dense.unsqueeze(1), self.table(ids)], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        alone = self.alone(ids).squeeze(-1)
        found: Tensor = self.top(torch.cat([dense, dots, alone], dim=1)) + alone.sum(1, keepdim=True)
        return found


def _layers(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build(
    features: Mapping[str, Any], width: int = 16, bottom: Sequence[int] = (64,), top: Sequence[int] = (128, 64)
) -> nn.Module:
    """The model for these features."""
    inputs = {one["name"]: one for one in features["inputs"]}
    numbers, categories = inputs["numbers"], inputs["categories"]
    return Dlrm(numbers["shape"][0], categories["cardinalities"], width, bottom, top)


class LazyAdam(optim.Optimizer):
    """Adam for layers, SparseAdam for tables: a row of a table moves when a batch names it, and costs nothing else.

    Args:
        model: whose embeddings with ``sparse=True`` are the tables.
        lr: of the layers.
        table_lr: of the tables, whose rows take fewer steps.
    """

    def __init__(self, model: nn.Module, lr: float, table_lr: float) -> None:
        tables = [one.weight for one in model.modules() if isinstance(one, nn.Embedding) and one.sparse]
        layers = [one for one in model.parameters() if not any(one is table for table in tables)]
        self.parts = (optim.Adam(layers, lr=lr), optim.SparseAdam(tables, lr=table_lr))
        super().__init__([part.param_groups[0] for part in self.parts], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; what a checkpoint keeps is here, and the parts work on it."""
        loss = None if closure is None else closure()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss


def lazy_adam(model: nn.Module) -> optim.Optimizer:
    """What the file names as ``optimizer``."""
    return LazyAdam(model, lr=0.001, table_lr=0.003)
