"""Buffers that a forward pass changes: the same on all ranks before a model is validated or saved."""

from __future__ import annotations

import hashlib

import torch
from torch.nn.modules.batchnorm import _NormBase

from sparkdl import observe
from sparkdl.collective.agree import agree_on_tensors
from sparkdl.collective.base import Ranks, as_bytes


class BufferSharing:
    """Shares the buffers of one model; says once that they had drifted apart.

    Every rank gets rank 0's; the warning names the first buffer that was another on some rank.

    Batch norm's are not looked at: they are equal where it is synchronised, and what was said where it is not suffices.
    """

    def __init__(self, model: torch.nn.Module, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._told = ranks.world.size == 1

    def __call__(self) -> None:
        """Give all ranks rank 0's buffers; every rank calls it."""
        named = list(self._model.named_buffers())
        if not named or self._ranks.world.size == 1:
            return
        agree_on_tensors(self._ranks, named)
        if not self._told:
            self._notice()
        self._ranks.broadcast_unchecked([buffer for _, buffer in named])

    def _notice(self) -> None:
        watched = {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, module in self._model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and not isinstance(module, _NormBase)
        }
        if not watched:
            return
        digests = torch.frombuffer(bytearray(b"".join(map(_digest, watched.values()))), dtype=torch.uint8)
        everyone = torch.stack(self._ranks.gather_rows(digests)).view(self._ranks.world.size, len(watched), -1)
        drifted = (everyone != everyone[0]).any(2).any(0).tolist()
        names = [name for name, differs in zip(watched, drifted, strict=True) if differs]
        if names:
            self._told = True
            if self._ranks.world.is_leader:
                more = f" and {len(names) - 1} more differ" if len(names) > 1 else " differs"
                observe.logger.warning(
                    "buffer %r%s between ranks, since each updates it from its own rows: all go on with rank 0's, so "
                    "that %d ranks train another model than one rank would",
                    names[0],
                    more,
                    self._ranks.world.size,
                )


def _digest(buffer: torch.Tensor) -> bytes:
    data = as_bytes(buffer.cpu()).numpy()
    return hashlib.blake2b(data.data, digest_size=8).digest()
