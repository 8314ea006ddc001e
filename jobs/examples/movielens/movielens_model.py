"""Two towers: what somebody liked and a movie each become a vector; their product is a logit a movie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Towers(nn.Module):
    """A tower for what somebody liked and one for movies; their product says how well they go together.

    The loss over movies of which one was liked and the others were drawn evenly is a sampled softmax: what it learns
    ranks all movies (Bengio and Senecal 2008, "Adaptive importance sampling to accelerate training of a neural
    probabilistic language model"; evenly drawn ones need no correction).

    Args:
        cardinalities: ids of ``seen`` and ``movies``, the unknown 0 among them.
        width: of all embeddings.
        offered: movies of a row.

    Shape:
        - Input: ``{"seen": (rows, n), "seen_mask": (rows, n), "movies": (rows, m), "movies_mask": (rows, m)}``
        - Output: ``(rows, offered)``
    """

    def __init__(self, cardinalities: Mapping[str, int], width: int, offered: int) -> None:
        super().__init__()
        self.offered = offered
        self.seen, self.movie = (nn.Embedding(cardinalities[name], width) for name in ("seen", "movies"))
        self.popular = nn.Embedding(cardinalities["movies"], 1)
        for table in (self.seen, self.movie):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.popular.weight)

    def of_user(self, row: Mapping[str, Tensor]) -> Tensor:
        """``(rows, width + 1)``: the mean of what somebody liked, zeros for nothing; the last number is 1."""
        ids, there = row["seen"], row["seen_mask"]
        liked = (self.seen(ids) * there.unsqueeze(-1)).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        return torch.cat([liked, torch.ones_like(liked[:, :1])], dim=1)

    def of_movies(self, ids: Tensor) -> Tensor:
        """``(..., width + 1)`` of movies; the last number is how popular each is."""
        return torch.cat([self.movie(ids), self.popular(ids)], dim=-1)

    def forward(self, row: dict[str, Tensor]) -> Tensor:
        """See the class."""
        products = torch.einsum("rw,rmw->rm", self.of_user(row), self.of_movies(row["movies"]))
        return products.reshape(len(products), self.offered)


def build(features: Mapping[str, Any], width: int = 32) -> nn.Module:
    """The model for these features."""
    sizes = {name: n for one in features["inputs"] for name, n in zip(one["names"], one["cardinalities"], strict=True)}
    return Towers(sizes, width, features["labels"][0]["outputs"])
