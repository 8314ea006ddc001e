"""Two towers: what somebody liked and a movie each become a vector; the product says whether they go together.

Enters: what the features are, as the pipeline describes them. Leaves: a module from the ids of a row to a logit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Bag(nn.Module):
    """The mean of the embeddings of a row's ids; zeros for a row without any."""

    def __init__(self, cardinality: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(cardinality, width)
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, ids: Tensor, there: Tensor) -> Tensor:
        """``(rows, n)`` ids, and which of them are no padding, to ``(rows, width)``."""
        found: Tensor = (self.table(ids) * there.unsqueeze(-1)).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        return found


class Towers(nn.Module):
    """See the module.

    Args:
        cardinalities: ids of ``seen``, ``genres`` and ``movie``, the unknown 0 among them.
        width: of all embeddings.

    Shape:
        - Input: ``{"seen": (rows, n), "seen_mask": (rows, n), "genres": ..., "categories": (rows, 1)}``
        - Output: ``(rows, 1)``
    """

    def __init__(self, cardinalities: Mapping[str, int], width: int) -> None:
        super().__init__()
        self.seen, self.genres = Bag(cardinalities["seen"], width), Bag(cardinalities["genres"], width)
        self.movie = nn.Embedding(cardinalities["movie"], width)
        self.popular = nn.Embedding(cardinalities["movie"], 1)
        nn.init.normal_(self.movie.weight, std=0.1)
        nn.init.zeros_(self.popular.weight)

    def of_user(self, row: Mapping[str, Tensor]) -> Tensor:
        """``(rows, width + 1)`` of what somebody liked; the last number is 1."""
        liked = self.seen(row["seen"], row["seen_mask"])
        return torch.cat([liked, torch.ones_like(liked[:, :1])], dim=1)

    def of_movie(self, row: Mapping[str, Tensor]) -> Tensor:
        """``(rows, width + 1)`` of a movie; the last number is how popular it is."""
        movie = row["categories"][:, 0]
        return torch.cat(
            [self.movie(movie) + self.genres(row["genres"], row["genres_mask"]), self.popular(movie)], dim=1
        )

    def forward(self, row: dict[str, Tensor]) -> Tensor:
        """See the class."""
        return (self.of_user(row) * self.of_movie(row)).sum(1, keepdim=True)


def build(features: Mapping[str, Any], width: int = 32) -> nn.Module:
    """The model for these features."""
    sizes = {name: n for one in features["inputs"] for name, n in zip(one["names"], one["cardinalities"], strict=True)}
    return Towers(sizes, width)
