"""Rows made up for a network: what ``export.py`` traces it with, and compares what it has written by.

Enters: a signature, features, the network. Leaves: the network's tensors for any number of rows, and which of their
dimensions vary. Ids stay below what the features, or the network's embedding tables, know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparkdl.features.fitted import Features
from sparkdl.models.calling import formed
from sparkdl.models.signature import Signature, TensorField

__all__ = ["ROWS", "MadeUp", "dimensions"]

ROWS = "rows"
"""The dimension of the batch."""


@dataclass(frozen=True, kw_only=True)
class MadeUp:
    """How rows are made up.

    Attributes:
        signature: of the network.
        ids: by input of whole numbers, the numbers that there are, for each element of a row or for all of them.
    """

    signature: Signature
    ids: dict[str, Tensor]

    @staticmethod
    def of(signature: Signature, features: Features | None, model: nn.Module) -> MadeUp:
        """For the inputs of a network."""
        known = {} if features is None else {one.name: one.cardinalities for one in features.inputs}
        tables = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
        most = torch.tensor(min(tables, default=2))
        ids = {}
        for field in signature.inputs:
            counted = [size for column in field.columns for size in known.get(column, ())]
            ids[field.name] = torch.tensor(counted) if counted else most
        return MadeUp(signature=signature, ids=ids)

    def tensors(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        """The inputs of ``rows`` rows in the order of the signature, in the forms that the network asks for."""
        draw = torch.Generator().manual_seed(seed)
        longest = 3 + rows % 4
        padded: dict[str, Tensor] = {}
        valid: dict[str, Tensor | None] = {}
        for field in self.signature.inputs:
            if not field.columns:
                continue
            shape = (rows, *(longest if size is None else size for size in field.shape))
            padded[field.name] = self._drawn(field, shape, draw)
            valid[field.name] = None
            if None in field.shape:
                lengths = torch.randint(1, longest + 1, (rows, 1), generator=draw)
                lengths[0] = longest
                there = torch.arange(longest) < lengths
                valid[field.name] = there
                padded[field.name] *= there.reshape(*there.shape, *[1] * (len(shape) - 2))
        found = []
        for field in self.signature.inputs:
            owner = self.signature.owner(field) or field
            form = field.form or ("mask" if owner is not field else "padded" if None in field.shape else "")
            found.append(formed(form, padded[owner.name], valid[owner.name]))
        return tuple(found)

    def _drawn(self, field: TensorField, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
        dtype: torch.dtype = getattr(torch, field.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=draw).to(dtype)
        if dtype == torch.bool:
            return torch.rand(shape, generator=draw) < 0.5
        most = self.ids[field.name].clamp(max=torch.iinfo(dtype).max)
        return (torch.rand(shape, generator=draw) * most).to(dtype)


def dimensions(signature: Signature) -> list[dict[int, str]]:
    """By input, in the order of the signature, the names of its dimensions that vary."""
    found = []
    for place, field in enumerate(signature.inputs):
        owner = signature.owner(field) or field
        length = f"length_{place if owner is field else signature.inputs.index(owner)}"
        if field.form == "flat":
            found.append({0: f"elements_{place}"})
        elif field.form in ("lengths", "offsets"):
            found.append({0: ROWS})
        else:
            of = owner.shape if owner is field else owner.shape[:1]
            varying = {axis: length for axis, size in enumerate(of, 1) if size is None}
            found.append({0: ROWS, **varying})
    return found
