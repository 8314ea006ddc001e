"""Sparse gradients of embeddings, averaged over the ranks: only the rows that some rank touched travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkdl.collective.base import Ranks, as_bytes

INDEX_BYTES = 8


def sparse_parameters(model: torch.nn.Module) -> set[torch.Tensor]:
    """The weights of embeddings that were made with ``sparse=True``."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {module.weight for module in model.modules() if isinstance(module, kinds) and module.sparse}


def average_sparse(ranks: Ranks, params: Sequence[torch.nn.Parameter], wire_dtype: torch.dtype | None) -> None:
    """Leave the mean over all ranks in every ``param.grad``; every rank calls it with the same ``params``.

    The mean is sparse again, with the rows that any rank touched; None where no rank has a gradient.
    """
    if not params:
        return
    local = [_rows_of(param) for param in params]
    counts = torch.tensor([-1 if rows is None else rows[0].numel() for rows in local], dtype=torch.int64)
    everyone = torch.stack(ranks.gather_rows(counts))
    for index, (param, rows) in enumerate(zip(params, local, strict=True)):
        touched = everyone[:, index]
        if int(touched.max()) < 0:
            param.grad = None
            continue
        where, values = rows if rows is not None else _no_rows(param)
        # A ring moves every row of the table about twice, a gather each touched row once to every other rank.
        if int(touched.clamp(min=0).sum()) < 2 * param.shape[0]:
            param.grad = _gathered(ranks, param, where, values, wire_dtype)
        else:
            param.grad = _reduced(ranks, param, where, values, f"sparse.{index}")


def _rows_of(param: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Row numbers ``(n,)`` and their gradients ``(n, ...)``, each row once."""
    if param.grad is None:
        return None
    grad = param.grad if param.grad.layout == torch.sparse_coo else param.grad.to_sparse(1)
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()


def _no_rows(param: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    return param.new_empty(0, dtype=torch.int64), param.new_empty((0, *param.shape[1:]))


def _gathered(
    ranks: Ranks,
    param: torch.nn.Parameter,
    where: torch.Tensor,
    values: torch.Tensor,
    wire_dtype: torch.dtype | None,
) -> torch.Tensor:
    dtype = wire_dtype if wire_dtype is not None and param.dtype in (torch.float32, torch.float64) else param.dtype
    count = where.numel()
    width = param.shape[1:].numel() * dtype.itemsize
    rows = torch.empty((count, INDEX_BYTES + width), dtype=torch.uint8, device=param.device)
    rows[:, :INDEX_BYTES] = as_bytes(where).view(count, INDEX_BYTES)
    rows[:, INDEX_BYTES:] = as_bytes(values.to(dtype)).view(count, width)
    gathered = torch.cat(ranks.gather_rows(rows))
    indices = gathered[:, :INDEX_BYTES].contiguous().view(-1).view(torch.int64)
    received = gathered[:, INDEX_BYTES:].contiguous().view(-1).view(dtype).view(-1, *param.shape[1:])
    mean = received.to(param.dtype) / ranks.world.size
    return torch.sparse_coo_tensor(indices[None], mean, param.shape, check_invariants=False).coalesce()


def _reduced(
    ranks: Ranks, param: torch.nn.Parameter, where: torch.Tensor, values: torch.Tensor, key: str
) -> torch.Tensor:
    """The same over the whole table, with a column that counts the ranks which touched a row."""
    flat = values.reshape(len(where), param.shape[1:].numel())  # of no row, too
    table = param.new_zeros((param.shape[0], flat.shape[1] + 1))
    table[where, :-1] = flat
    table[where, -1] = 1.0
    ranks.start_all_reduce(table.view(-1), "sum", key).wait()
    rows = table[:, -1].nonzero()[:, 0]
    mean = table[rows, :-1].view(-1, *param.shape[1:]) / ranks.world.size
    return torch.sparse_coo_tensor(rows[None], mean, param.shape, is_coalesced=True, check_invariants=False)
