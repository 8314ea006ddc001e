"""Two towers: a basket of any length and an article each become a vector; the product is the logit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """A tower for a basket and one for an article with its tags; their product says whether they go together.

    Args:
        cardinalities: ids of ``basket``, ``tags`` and ``article``, the unknown 0 among them.
        width: of all embeddings.

    Shape:
        - Input: ``{"basket": (rows, n), "basket_mask": (rows, n), "tags": ..., "categories": (rows, 1)}``
        - Output: ``(rows, 1)``
    """

    def __init__(self, cardinalities: Mapping[str, int], width: int) -> None:
        super().__init__()
        self.basket, self.tags = Bag(cardinalities["basket"], width), Bag(cardinalities["tags"], width)
        self.article = nn.Embedding(cardinalities["article"], width)
        self.liked = nn.Embedding(cardinalities["article"], 1)
        nn.init.normal_(self.article.weight, std=0.1)
        nn.init.zeros_(self.liked.weight)
        self.of_basket, self.of_article = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, row: dict[str, Tensor]) -> Tensor:
        """See the class."""
        offered = row["categories"][:, 0]
        basket = self.of_basket(self.basket(row["basket"], row["basket_mask"]))
        article = self.of_article(self.article(offered) + self.tags(row["tags"], row["tags_mask"]))
        return (basket * article).sum(1, keepdim=True) + self.liked(offered)


def build(features: Mapping[str, Any], width: int = 16) -> nn.Module:
    """The model for these features."""
    sizes = {name: n for one in features["inputs"] for name, n in zip(one["names"], one["cardinalities"], strict=True)}
    return Towers(sizes, width)
