"""The networks that sparkdl brings, loaded like torch's own layers without a word of the reader's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# This module holds nothing but such classes: whoever prepares a bundle can have any of them made, with any arguments.
# They take plain values that travel in a bundle. No layer lets rows meet: normalisation is by row.
__all__ = ["TabularEnsemble", "TabularNet"]

_BENDS, _NUMBERS_WITH_ALL_BENDS, _MOST_BENT_NUMBERS = 8, 64, 256
"""Piecewise linear functions of each number; there are fewer of more numbers, and none where numbers are very many:
of 500 numbers they took six times as long as all else, 27 ms a step of 128 rows beside 4."""
_MOST_INTERVALS = 4_000_000
"""The intervals of all columns, each with room for as many as the one with most: a short document could name more."""
_REACH = 6.0
"""Deviations from the median that no number counts for more than; of 3 and 8 the errors were greater."""
_REACH_OF_LOGARITHMS = 30.0
"""The logarithm of an amount beyond which the loss grows no further, as ``PoissonLoss`` has it."""
_FEW_IDS = 8
"""Ids up to which each has a place of its own."""


class TabularNet(nn.Module):
    """Embeddings of ids, numbers as they are, a convolution for images, a residual MLP over all of it.

    It is plain and quick, and was sparkdl's own network before ``TabularEnsemble``, which is better on most tables.

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
        self.names = [str(tensor["name"]) for tensor in features["inputs"]]
        parts = [_part(tensor, embedding) for tensor in features["inputs"]]
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
        parts = [part(row[name], row.get(f"{name}_mask")) for name, part in zip(self.names, self.parts, strict=True)]
        hidden = self.enter(torch.cat(parts, dim=1))
        for block in self.blocks:
            hidden = block(hidden)
        answer: Tensor = self.leave(hidden) * self.deviation + self.mean
        return answer if len(self.outputs) == 1 else torch.split(answer, self.outputs, dim=1)


class TabularEnsemble(nn.Module):
    """A few networks in one, that share all but their first scales and their last layer; sparkdl's own for tables.

    Each number enters as it is, and once more as piecewise linear functions of it that bend where the training rows lie
    (Gorishniy et al. 2022, "On embeddings for numerical features in tabular deep learning", 3.2); ids enter as
    embeddings, images through a convolution. Each of the ``members`` scales all that by numbers of its own, and then
    goes through the layers of all and its own last layer (Gorishniy et al. 2025, "TabM", the variant mini). The mean
    over the members is the answer.

    Each member is trained on its own loss: that of the mean, which the trainer computes, and, as ``auxiliary_loss``,
    what the members' losses exceed it by on average. It depends on no label for squared errors, where it is the
    variance of the members, for amounts and for classes. Of other losses the mean alone is trained. Sample weights
    weigh the first of both alone.

    Args:
        features: ``{"inputs": [{"name": ..., "shape": [...], "cardinalities": [...], "knots": [[...], ...]}, ...],
            "labels": [{"name": ..., "type": ..., "outputs": 1, "mean": 0.0, "deviation": 1.0, "loss": "mse", "weight":
            1.0}, ...]}``: inputs as ``TabularNet`` takes them; ``knots`` of an input of numbers are ascending numbers
            for each of its columns, none for columns that are to enter as they are alone. Without type and loss of a
            label, its mean alone is trained.
        width: of the hidden layers.
        depth: how many hidden layers.
        embedding: width of every embedding of ids; by default it follows from the number of ids.
        dropout: share of hidden units that a training step leaves out.
        members: how many networks; 1 is a plain one.
        bends: piecewise linear functions of each number; by default 8, fewer of more than 64 numbers, none of more
            than 256; 0 for none.

    Shape:
        - Input: ``{"numbers": (rows, k), "categories": (rows, c), "<ids>": (rows, n), "<ids>_mask": (rows, n), ...}``
        - Output: ``(rows, outputs)`` of the one label, or a tuple of one such a label.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        features: Mapping[str, Any],
        width: int = 192,
        depth: int = 3,
        embedding: int | None = None,
        dropout: float = 0.0,
        members: int = 4,
        bends: int | None = None,
    ) -> None:
        super().__init__()
        self._arguments = {"features": features, "width": width, "depth": depth, "embedding": embedding,
                           "dropout": dropout, "members": members, "bends": bends}  # fmt: skip
        if depth < 1 or members < 1:
            raise ValueError(f"depth={depth} and members={members} have to be 1 or more")
        self.labels = [dict(label) for label in features["labels"]]
        self.outputs = [int(label["outputs"]) for label in self.labels]
        self.names = [str(tensor["name"]) for tensor in features["inputs"]]
        parts = [_ensemble_part(tensor, embedding, bends) for tensor in features["inputs"]]
        self.parts = nn.ModuleList(parts)
        entering = sum(part.width for part in parts)
        # Every member looks at the inputs in its own proportions, some of them turned round: that makes them differ.
        proportions = torch.ones(members, entering)
        # Not by ``randn``, for which torch loads sympy on the meta device: see ``bounded_build``.
        self.scales = nn.Parameter(proportions.normal_() if members > 1 else proportions)
        layers: list[nn.Module] = []
        for layer in range(depth):
            layers += [nn.Linear(width if layer else entering, width), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers)
        bound = 1 / math.sqrt(width)
        self.leave = nn.Parameter(torch.empty(members, sum(self.outputs), width).uniform_(-bound, bound))
        self.leave_bias = nn.Parameter(torch.zeros(members, sum(self.outputs)))
        for name in ("mean", "deviation"):
            scales = [torch.full((int(label["outputs"]),), label[name], dtype=torch.float32) for label in self.labels]
            self.register_buffer(name, torch.cat(scales))
        self.auxiliary_loss: Tensor | None = None

    def bundle_arguments(self) -> dict[str, Any]:
        """What it was made with, from which a bundle makes it again."""
        return self._arguments

    def forward(self, row: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Predict, see the class."""
        parts = [part(row[name], row.get(f"{name}_mask")) for name, part in zip(self.names, self.parts, strict=True)]
        hidden = self.layers(torch.cat(parts, dim=1) * self.scales.unsqueeze(1))  # (members, rows, width)
        leaving = torch.baddbmm(self.leave_bias.unsqueeze(1), hidden, self.leave.transpose(1, 2))
        answers = leaving * self.deviation + self.mean
        answer = answers.mean(0)
        if self.training:
            self.auxiliary_loss = self._excess(answers, answer)
        return answer if len(self.outputs) == 1 else torch.split(answer, self.outputs, dim=1)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "auxiliary_loss": None}  # a part of a graph can be neither copied nor pickled

    def _excess(self, answers: Tensor, answer: Tensor) -> Tensor | None:
        """What the mean loss of the members exceeds the loss of their mean by; a mean over the rows."""
        excess: Tensor | None = None
        of_members, of_mean = (torch.split(values, self.outputs, dim=-1) for values in (answers, answer))
        for label, members, mean in zip(self.labels, of_members, of_mean, strict=True):
            kind, loss = label.get("type"), label.get("loss")
            if kind == "regression" and loss == "mse":
                of_label = (members - mean).square().mean()
            elif kind == "regression" and loss == "poisson":  # exp(z) - y z: the second term is linear in z
                of_label = members.clamp(max=_REACH_OF_LOGARITHMS).exp().mean()
                of_label = of_label - mean.clamp(max=_REACH_OF_LOGARITHMS).exp().mean()
            elif kind == "binary" and loss == "log_loss":  # softplus(z) - y z: the second term is linear in z
                of_label = functional.softplus(members).mean() - functional.softplus(mean).mean()
            elif kind == "multiclass" and loss == "log_loss":
                of_label = members.logsumexp(-1).mean() - mean.logsumexp(-1).mean()
            else:
                continue
            of_label = of_label * float(label.get("weight", 1.0))
            excess = of_label if excess is None else excess + of_label
        return excess


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


class _BentNumbers(_Part):
    """Numbers as they are, and beside them ``bends`` piecewise linear functions of each, rectified.

    The numbers as they are lose weight far from the median, as RealMLP's do (Holzmueller et al. 2024): six deviations
    count as 4.2, a hundred as 6. What lies farther out than half the span of the training rows beyond it counts as if
    it lay there. A few odd rows, and a slip of the pen by a factor of ten, are otherwise carried on along a line.
    """

    low: Tensor
    high: Tensor
    center: Tensor
    reach: Tensor
    starts: Tensor
    slopes: Tensor

    def __init__(self, knots: Sequence[Sequence[float]], bends: int) -> None:
        super().__init__()
        self.columns, self.bends = len(knots), bends
        self.width = self.columns * (1 + bends)
        intervals = max(1, *(len(ends) - 1 for ends in knots))
        if len(knots) * intervals > _MOST_INTERVALS:
            raise ValueError(
                f"{len(knots)} columns, of which one has {intervals} intervals, are more than {_MOST_INTERVALS:,} in "
                "all: give the columns fewer knots"
            )
        bounds, starts, slopes = [], [], []  # of all columns, and each one tensor: a tensor a column takes ever longer
        for ends in knots:
            low, high, center, reach = -math.inf, math.inf, 0.0, math.inf
            if len(ends) > 1:
                margin = (ends[-1] - ends[0]) / 2
                low, high = ends[0] - margin, ends[-1] + margin
            if len(ends) > 3:  # standardised numbers have a deviation of 1; of others, it is about a quarter of most
                center, reach = ends[len(ends) // 2], _REACH * max(1.0, (ends[-2] - ends[1]) / 4)
            bounds.append((low, high, center, reach))
            lengths = [end - start for start, end in itertools.pairwise(ends)]
            if len(lengths) < 2:  # two ends are one line, which the number itself is
                lengths = []
            # Of a column with fewer intervals the rest have the slope 0, and so a share of 0 for every number.
            padding = [0.0] * (intervals - len(lengths))
            starts.append([*ends[: len(lengths)], *padding])
            slopes.append([*(min(1 / length, 1e30) for length in lengths), *padding])
        for name, values in zip(
            ("low", "high", "center", "reach"), torch.tensor(bounds, dtype=torch.float64).T, strict=True
        ):
            self.register_buffer(name, values.float())
        if not bends:
            return
        self.register_buffer("starts", torch.tensor(starts, dtype=torch.float32).unsqueeze(2))
        self.register_buffer("slopes", torch.tensor(slopes, dtype=torch.float32).unsqueeze(2))
        # At first each function is a straight line: of the number itself, the last, and of no interval.
        lines = torch.zeros(self.columns, bends, intervals + 1)
        lines[:, :, -1].uniform_(-1, 1)
        self.lines = nn.Parameter(lines)
        self.line_bias = nn.Parameter(torch.empty(self.columns, bends, 1).uniform_(-1, 1))

    def forward(self, values: Tensor, mask: Tensor | None) -> Tensor:
        clamped = values.reshape(values.shape[0], self.columns).float().clamp(self.low, self.high)
        distance = clamped - self.center
        numbers = self.center + distance * (1 + (distance / self.reach).square()).rsqrt()
        if not self.bends:
            return numbers
        # Rows come last: products of many small matrices, (bends, intervals) by (intervals, rows), are quicker so; 512
        # rows of 14 columns take .5 ms forth and back, and 1.2 with intervals last.
        shares = ((clamped.T.unsqueeze(1) - self.starts) * self.slopes).clamp(0, 1)  # how much of each is passed
        pieces = torch.cat([shares, numbers.T.unsqueeze(1)], dim=1)  # (columns, intervals + 1, rows)
        bent = torch.baddbmm(self.line_bias, self.lines, pieces).flatten(0, 1)
        return torch.cat([numbers, bent.T.relu()], dim=1)


class _Categories(_Part):
    def __init__(
        self,
        cardinalities: Sequence[int],
        embedding: int | None,
        width: Callable[[int], int],
        table: Callable[[int, int], nn.Embedding],
    ) -> None:
        super().__init__()
        widths = [embedding or width(count) for count in cardinalities]
        self.tables = nn.ModuleList(map(table, cardinalities, widths))
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
        is_id = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        vectors = self.table(values.long()) * is_id.unsqueeze(-1)
        mean: Tensor = vectors.sum(1) / is_id.sum(1, keepdim=True).clamp(min=1)
        return mean


class _Image(_Part):
    """Three convolutions, each halving the picture; normalised by row."""

    def __init__(self, shape: Sequence[int], width: int = 64) -> None:
        super().__init__()
        self.shape, self.width = list(shape), width
        layers: list[nn.Module] = []
        for entering, leaving in ((shape[0], 16), (16, 32), (32, width)):
            layers += [nn.Conv2d(entering, leaving, 3, padding=1), nn.GroupNorm(4, leaving), nn.ReLU()]
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, width))

    def forward(self, values: Tensor, mask: Tensor | None) -> Tensor:
        pixels = values.reshape(values.shape[0], *self.shape)
        scaled = pixels.float() if pixels.is_floating_point() else pixels.float() / 255
        features: Tensor = self.layers(scaled)
        return features


def _part(tensor: Mapping[str, Any], embedding: int | None) -> _Part:
    sizes, shape = list(tensor.get("cardinalities", ())), list(tensor["shape"])
    if sizes:
        return _Categories(sizes, embedding, _width, _table) if shape else _Bag(sizes[0], embedding)
    return _Image(shape) if len(shape) == 3 else _Numbers(shape[0])


def _ensemble_part(tensor: Mapping[str, Any], embedding: int | None, bends: int | None) -> _Part:
    sizes, knots = list(tensor.get("cardinalities", ())), list(tensor.get("knots", ()))
    if sizes and list(tensor["shape"]):
        return _Categories(sizes, embedding, _ensemble_width, _ensemble_table)
    if bends is None:
        fewer = min(_BENDS, _NUMBERS_WITH_ALL_BENDS * _BENDS // max(1, len(knots)))
        bends = fewer if len(knots) <= _MOST_BENT_NUMBERS else 0
    if any(knots):
        return _BentNumbers(knots, bends)
    return _part(tensor, embedding)


def _ensemble_width(cardinality: int) -> int:
    """The width of an embedding: one place for each of a few ids, as indicators have it; 16 at most."""
    return cardinality if cardinality <= _FEW_IDS else min(16, _width(cardinality))


def _ensemble_table(cardinality: int, width: int) -> nn.Embedding:
    """Vectors of ids: indicators of a few, small ones of many."""
    table = _table(cardinality, width)
    if width == cardinality <= _FEW_IDS:
        nn.init.eye_(table.weight)
    return table


def _table(cardinality: int, width: int) -> nn.Embedding:
    """Vectors of ids, small at first: of PyTorch's own N(0, 1) a table of many ids drowns the numbers beside it.

    That of id 0, the unknown, is zero at first, among the others: so it stays where no training row is unknown.
    """
    table = nn.Embedding(cardinality, width)
    nn.init.normal_(table.weight, std=0.1)
    nn.init.zeros_(table.weight[0])
    return table


def _width(cardinality: int) -> int:
    """The width of an embedding: 1.6 times the 0.56th power of its ids, 64 at most: many libraries' rule of thumb."""
    return int(min(64, round(1.6 * cardinality**0.56)))
