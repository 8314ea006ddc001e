"""The networks that sparkdl brings; a saved one is loaded without a word of the reader's, as torch's own layers are.

Enters: what features and labels are, as plain values that travel in a bundle. Leaves: a module that takes one dict of
inputs. No layer lets rows meet: normalisation is by row. This module holds nothing but such classes: whoever prepares a
bundle can have any of them made, with any arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TabularNet"]


class TabularNet(nn.Module):
    """Embeddings of ids, numbers as they are, a convolution for images, a residual MLP over all of it.

    Args:
        features: ``{"inputs": [{"name": ..., "shape": [...], "cardinalities": [...]}, ...], "labels": [{"name": ...,
            "outputs": 1, "mean": 0.0, "deviation": 1.0}, ...]}``: an input with cardinalities holds ids, one column
            each, or lists of ids where its shape is empty; one of three dimensions holds images; others hold numbers.
            The last layer starts at the means and deviations of the labels.
        width: of the hidden layers.
        depth: how many residual blocks.
        embedding: width of every embedding; by default it follows from the number of ids.
        dropout: share of hidden units that a training step leaves out.

    Shape:
        - Input: ``{"numbers": (rows, k), "categories": (rows, c), "<ids>": (rows, n), "<ids>_mask": (rows, n), ...}``
        - Output: ``(rows, outputs)`` of the one label, or a tuple of one such a label.
    """

    def __init__(
        self,
        features: Mapping[str, Any],
        width: int = 128,
        depth: int = 2,
        embedding: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self._arguments = {"features": features, "width": width, "depth": depth, "embedding": embedding,
                           "dropout": dropout}  # fmt: skip
        labels = features["labels"]
        self.names = [str(each["name"]) for each in features["inputs"]]
        parts = [_part(each, embedding) for each in features["inputs"]]
        self.parts = nn.ModuleList(parts)
        self.enter = nn.Linear(sum(part.width for part in parts), width)
        self.blocks = nn.ModuleList(_Block(width, dropout) for _ in range(depth))
        self.outputs = [int(label["outputs"]) for label in labels]
        self.leave = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, sum(self.outputs)))
        for name in ("mean", "deviation"):
            scales = [torch.full((int(label["outputs"]),), label[name], dtype=torch.float32) for label in labels]
            self.register_buffer(name, torch.cat(scales))

    def bundle_arguments(self) -> dict[str, Any]:
        """What it was made with, from which a bundle makes it again."""
        return self._arguments

    def forward(self, row: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Predict, see the class."""
        found = [part(row[name], row.get(f"{name}_mask")) for name, part in zip(self.names, self.parts, strict=True)]
        hidden = self.enter(torch.cat(found, dim=1))
        for block in self.blocks:
            hidden = block(hidden)
        answer: Tensor = self.leave(hidden) * self.deviation + self.mean
        return answer if len(self.outputs) == 1 else torch.split(answer, self.outputs, dim=1)


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, width),
        )  # fmt: skip

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = hidden + self.change(hidden)
        return changed


class _Part(nn.Module):
    """What makes ``width`` numbers of one input."""

    width: int


class _Numbers(_Part):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, values: Tensor, mask: Tensor | None) -> Tensor:
        return values.reshape(values.shape[0], self.width).float()


class _Categories(_Part):
    def __init__(self, cardinalities: Sequence[int], embedding: int | None) -> None:
        super().__init__()
        widths = [embedding or _width(count) for count in cardinalities]
        self.tables = nn.ModuleList(map(_table, cardinalities, widths))
        self.width = sum(widths)

    def forward(self, values: Tensor, mask: Tensor | None) -> Tensor:
        columns = values.reshape(values.shape[0], len(self.tables)).long().unbind(1)
        return torch.cat([table(ids) for table, ids in zip(self.tables, columns, strict=True)], dim=1)


class _Bag(_Part):
    """The mean of a row's embeddings; zeros for a row without ids."""

    def __init__(self, cardinality: int, embedding: int | None) -> None:
        super().__init__()
        self.table = _table(cardinality, embedding or _width(cardinality))
        self.width = self.table.embedding_dim

    def forward(self, values: Tensor, mask: Tensor | None) -> Tensor:
        there = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        found = self.table(values.long()) * there.unsqueeze(-1)
        mean: Tensor = found.sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        return mean


class _Image(_Part):
    """Three convolutions, each halving the picture; normalised by row."""

    def __init__(self, shape: Sequence[int], width: int = 64) -> None:
        super().__init__()
        self.shape, self.width = list(shape), width
        layers: list[nn.Module] = []
        for before, after in ((shape[0], 16), (16, 32), (32, width)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, width))

    def forward(self, values: Tensor, mask: Tensor | None) -> Tensor:
        pixels = values.reshape(values.shape[0], *self.shape)
        scaled = pixels.float() if pixels.is_floating_point() else pixels.float() / 255
        found: Tensor = self.layers(scaled)
        return found


def _part(each: Mapping[str, Any], embedding: int | None) -> _Part:
    sizes, shape = list(each.get("cardinalities", ())), list(each["shape"])
    if sizes:
        return _Categories(sizes, embedding) if shape else _Bag(sizes[0], embedding)
    return _Image(shape) if len(shape) == 3 else _Numbers(shape[0])


def _table(cardinality: int, width: int) -> nn.Embedding:
    """Vectors of ids, small at first: of PyTorch's own N(0, 1) a table of many ids drowns the numbers beside it."""
    made = nn.Embedding(cardinality, width)
    nn.init.normal_(made.weight, std=0.1)
    return made


def _width(cardinality: int) -> int:
    """Of an embedding: 1.6 times the 0.56th power of its ids, 64 at most; a rule of thumb that many libraries share."""
    return int(min(64, round(1.6 * cardinality**0.56)))
