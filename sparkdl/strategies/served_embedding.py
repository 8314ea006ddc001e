"""Embeddings whose tables lie on parameter servers: a rank fetches the rows that it looks up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from sparkdl.errors import ConfigError

TABLE_BYTES = 2**16
"""An embedding of fewer bytes travels whole: a question for single rows takes longer."""


def tables_of(model: torch.nn.Module, trained: set[torch.nn.Parameter]) -> dict[torch.nn.Parameter, torch.nn.Embedding]:
    """Embeddings whose rows alone a rank needs: no other module has the weight, and a lookup does not change it."""
    users = Counter(parameter for module in model.modules() for parameter in module._parameters.values())
    tables = {}
    for module in model.modules():
        if type(module) is torch.nn.Embedding and module is not model:
            weight = module._parameters["weight"]
            is_plain = module.max_norm is None and not module.scale_grad_by_freq and users[weight] == 1
            if is_plain and weight in trained and weight.requires_grad and weight.nbytes >= TABLE_BYTES:
                tables[weight] = module
    return tables


class ServedEmbedding(torch.nn.Module):
    """An embedding whose table lies on servers; its ``weight`` has a shape, a sparse gradient, and no memory."""

    def __init__(self, plain: torch.nn.Embedding, name: str, fetch: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.padding_idx, self.sparse = plain.padding_idx, plain.sparse
        self._name, self._fetch = name, fetch
        nowhere = plain.weight.detach().new_full((1, 1), float("nan")).expand(plain.weight.shape)
        self._parameters["weight"] = torch.nn.Parameter(nowhere)  # not by name: the property is in the way
        self.train(plain.training)

    @property
    def placeholder(self) -> torch.nn.Parameter:
        """The ``weight`` for the optimizer: a shape, and a gradient."""
        parameter = self._parameters["weight"]
        assert parameter is not None
        return parameter

    @property
    def weight(self) -> torch.Tensor:
        """Raise: nobody here has it.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"the model reads {self._name!r} itself, the weight of an embedding, and strategy='parameter_server' gives "
            "a rank the rows alone that it looks up: choose strategy='all_reduce'"
        )

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows ``numbers`` of any shape, as ``nn.Embedding`` does."""
        rows, places = torch.unique(numbers, return_inverse=True)
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < self.num_embeddings:
            raise IndexError(f"row {int(rows[0])} to {int(rows[-1])} of a table of {self.num_embeddings}")
        values = self._fetch(rows)
        looked_up: torch.Tensor = _Lookup.apply(self.placeholder, values, rows, places, self.padding_idx)  # type: ignore[no-untyped-call]
        return looked_up

    def plain(self, table: torch.Tensor) -> torch.nn.Embedding:
        """The module that it stands for, with ``table``."""
        embedding = torch.nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, sparse=self.sparse, _weight=table
        )
        return embedding.train(self.training)


class _Lookup(torch.autograd.Function):
    """Rows of a table that is not here; the gradient is that of the rows, sparse."""

    @staticmethod
    def forward(
        ctx: Any,
        table: torch.Tensor,
        values: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        padding: int | None,
    ) -> torch.Tensor:
        """Return ``values[places]``."""
        ctx.save_for_backward(rows, places)
        ctx.padding, ctx.shape = padding, table.shape
        return values[places]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Add up what each row got; the row of padding gets nothing."""
        rows, places = ctx.saved_tensors
        (gradient,) = gradients
        width = ctx.shape[1]
        values = gradient.new_zeros((len(rows), width))
        values.index_add_(0, places.reshape(-1), gradient.reshape(-1, width))
        if ctx.padding is not None:
            values[rows == ctx.padding] = 0
        sparse = torch.sparse_coo_tensor(rows[None], values, ctx.shape, is_coalesced=True, check_invariants=False)
        return sparse, None, None, None, None
