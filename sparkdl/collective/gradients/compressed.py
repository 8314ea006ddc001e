"""Carriers of gradients that travel as less than they are, or are joined otherwise than by their mean."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparkdl.collective.base import Ranks, as_bytes
from sparkdl.collective.gradients.buckets import Bucket
from sparkdl.config import Compression

Parts = Sequence[tuple[torch.nn.Parameter, torch.Tensor]]
"""Parameters, each with the view of a bucket that holds its gradient."""


class LossyCarrier(ABC):
    """A carrier that exchanges all buckets behind the backward pass: see ``Carrier``.

    What a rank did not send is its residual, and is added to its next gradient (error feedback: Karimireddy et al.,
    ICML 2019).

    Args:
        ranks: the backend.
        compression: how much is sent.
    """

    overlaps = False

    def __init__(self, ranks: Ranks, compression: Compression) -> None:
        self.name = f"{ranks.name}, {compression}"
        self._ranks, self._compression = ranks, compression
        self._residuals: dict[torch.nn.Parameter, torch.Tensor] = {}

    @abstractmethod
    def exchange(self, parts: Parts) -> None:
        """Overwrite each gradient with what all ranks step by; every rank calls it with the same parameters."""

    def place(self, buckets: Sequence[Bucket]) -> None:
        """Collect gradients where they stay."""
        for bucket in buckets:
            bucket.place(bucket.flat)

    def send(self, bucket: Bucket, key: str) -> None:
        """Fill ``bucket``."""
        bucket.fill()

    @torch.no_grad()
    def receive(self, buckets: Sequence[Bucket], weight: float = 1.0) -> None:
        """Tell which gradients there are on any rank, and exchange these; others keep their residuals."""
        for bucket in buckets:
            flags = bucket.flat[bucket.flat.numel() - len(bucket.params) :]
            self._sum(flags)
            present = (flags > 0).tolist()
            views = zip(bucket.params, bucket.views, present, strict=True)
            parts = [(param, view) for param, view, anywhere in views if anywhere]
            if parts:
                self.exchange(parts)

    def residual(self, param: torch.nn.Parameter) -> torch.Tensor:
        """What this rank has not sent so far of the gradients of ``param``."""
        if param not in self._residuals:
            self._residuals[param] = torch.zeros_like(param)
        return self._residuals[param]

    def rank_state(self, params: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        """What the next step depends on, by the position of a parameter."""
        residuals = {i: self._residuals[param] for i, param in enumerate(params) if param in self._residuals}
        return {"compression": str(self._compression), "residuals": residuals}

    def load_rank_state(self, state: Mapping[str, Any], params: Sequence[torch.nn.Parameter]) -> None:
        """Go on from a state of the same compression; another one's is left out."""
        if state.get("compression") == str(self._compression):
            for index, residual in state["residuals"].items():
                self.residual(params[int(index)]).copy_(residual)

    def close(self) -> None:
        """Let go of what was not sent."""
        self._residuals.clear()

    def _sum(self, flat: torch.Tensor) -> None:
        self._ranks.start_all_reduce(flat, "sum", "lossy").wait()

    def _mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with their means over the ranks, in one message."""
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._sum(flat)
        flat /= self._ranks.world.size
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


class PowerSGDCarrier(LossyCarrier):
    """Matrices travel as their products with a few vectors each (Vogels et al., NeurIPS 2019, algorithm 1).

    A gradient of n rows and m columns costs ``rank * (n + m)`` numbers instead of ``n * m``; one that this would not
    make smaller, as a bias, travels whole. The vectors of a step are where those of the next one start.
    """

    def __init__(self, ranks: Ranks, compression: Compression) -> None:
        super().__init__(ranks, compression)
        self._right: dict[torch.nn.Parameter, torch.Tensor] = {}

    def exchange(self, parts: Parts) -> None:
        """One step of the power method: P = M Q, orthogonal; Q = M' P; M is P Q'."""
        cut = [(param, gradient) for param, gradient in parts if self._rank_of(param)]
        self._mean([gradient for param, gradient in parts if not self._rank_of(param)])
        wide = torch.float64 if cut and cut[0][1].dtype == torch.float64 else torch.float32  # QR knows no 16 bits
        matrices = [(gradient + self.residual(param)).reshape(len(param), -1).to(wide) for param, gradient in cut]
        lefts = [matrix @ self._start(param, matrix) for (param, _), matrix in zip(cut, matrices, strict=True)]
        self._mean(lefts)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        self._mean(rights)
        for (param, gradient), matrix, left, right in zip(cut, matrices, lefts, rights, strict=True):
            common = left @ right.T
            self.residual(param).copy_((matrix - common).view(param.shape))
            gradient.copy_(common.view(param.shape))
            self._right[param] = right

    def _rank_of(self, param: torch.nn.Parameter) -> int:
        """How many vectors a gradient travels as; 0 for one that travels whole."""
        if param.dim() < 2 or not param.numel():
            return 0
        rows, columns = len(param), param.numel() // len(param)
        rank = min(int(self._compression.rank), rows, columns)
        return rank if rank * (rows + columns) < rows * columns else 0

    def _start(self, param: torch.nn.Parameter, matrix: torch.Tensor) -> torch.Tensor:
        """Equal on all ranks: that of the step before, at first numbers that hang on the shape alone."""
        if param not in self._right:
            generator = torch.Generator().manual_seed(matrix.shape[1])
            start = torch.randn(matrix.shape[1], self._rank_of(param), generator=generator, dtype=torch.float64)
            self._right[param] = start.to(matrix)
        return self._right[param]

    def rank_state(self, params: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        """The residuals, and the vectors."""
        right = {i: self._right[param] for i, param in enumerate(params) if param in self._right}
        return super().rank_state(params) | {"right": right}

    def load_rank_state(self, state: Mapping[str, Any], params: Sequence[torch.nn.Parameter]) -> None:
        """Take over the residuals, and the vectors."""
        super().load_rank_state(state, params)
        if state.get("compression") == str(self._compression):
            self._right = {
                params[int(index)]: right.to(params[int(index)].device) for index, right in state["right"].items()
            }


class TopKCarrier(LossyCarrier):
    """The numbers of largest size travel, with their places (Aji and Heafield, EMNLP 2017; Lin et al., ICLR 2018).

    Each of a share ``keep`` costs its own bytes and four for its place, from every rank to every other one.
    """

    def exchange(self, parts: Parts) -> None:
        """Send what is largest in the whole bucket; all ranks add up what they get in the order of the ranks."""
        flat = torch.cat([(gradient + self.residual(param)).reshape(-1) for param, gradient in parts])
        count = max(1, math.ceil(self._compression.keep * flat.numel()))
        kind = torch.int32 if flat.numel() < 2**31 else torch.int64
        places = torch.topk(flat.abs(), count).indices.to(kind)
        values = flat[places]
        flat[places] = 0
        common = torch.zeros_like(flat)
        for packed in self._ranks.gather_rows(torch.cat([as_bytes(places), as_bytes(values)])):
            their_places, their_values = torch.split(packed, [places.nbytes, values.nbytes])
            common.index_add_(0, their_places.clone().view(kind), their_values.clone().view(flat.dtype))
        common /= self._ranks.world.size
        sizes = [param.numel() for param, _ in parts]
        for (param, gradient), residual, mean in zip(
            parts, torch.split(flat, sizes), torch.split(common, sizes), strict=True
        ):
            self.residual(param).copy_(residual.view(param.shape))
            gradient.copy_(mean.view(param.shape))


class AdasumCarrier(LossyCarrier):
    """Gradients are added as far as they are orthogonal, and averaged as far as they agree (Maleki et al., MLSys 2021).

    Pairs of ranks are joined, then pairs of pairs; a rank that is left over waits for the next round. Every rank gets
    every gradient: ``ranks - 1`` times the bytes of one, where a ring sends twice them.

    What a rank gives is the mean gradient of its own rows of the step, however many they are, as with Horovod: its part
    of the global batch's mean is divided by its weight first, and a rank without rows is left out of the tree. So a
    last batch of k rows makes the step of k ranks, and one of a single row that of plain SGD. Batches that are
    accumulated are one of all their rows. Where a loss divides by other than its rows, as by sample weights, each rank
    does by its own (``train.objective.loss``); one whose rows count nothing has zeros, which add nothing.
    """

    _weight = 1.0

    def receive(self, buckets: Sequence[Bucket], weight: float = 1.0) -> None:
        """Join the gradients of the ranks whose ``weight`` is not 0, each divided by its own."""
        self._weight = weight
        super().receive(buckets)

    def exchange(self, parts: Parts) -> None:
        """Join each parameter's gradients by itself."""
        flat = torch.cat([gradient.reshape(-1) for _, gradient in parts])
        if self._weight not in (0.0, 1.0):
            flat /= self._weight
        sizes = [gradient.numel() for _, gradient in parts]
        has_rows = flat.new_tensor([self._weight != 0.0])
        gathered = [
            torch.split(numbers[:-1], sizes)
            for numbers in self._ranks.gather_rows(torch.cat([flat, has_rows]))
            if numbers[-1]
        ]
        for (_, gradient), *by_rank in zip(parts, *gathered, strict=True):
            gradient.copy_(_adasum([tensor.view(gradient.shape) for tensor in by_rank]))


def _adasum(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Join gradients in pairs, as a tree."""
    while len(gradients) > 1:
        pairs = zip(gradients[::2], gradients[1::2], strict=False)
        left_over = gradients[len(gradients) // 2 * 2 :]
        gradients = [_joined(first, second) for first, second in pairs] + left_over
    return gradients[0]


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``(1 - ab / 2aa) a + (1 - ab / 2bb) b``: the sum of orthogonal gradients, the mean of equal ones."""
    common = torch.sum(first * second)
    shares = [1 - common / (2 * square) if square > 0 else torch.ones_like(common)
              for square in (torch.sum(first * first), torch.sum(second * second))]  # fmt: skip
    return shares[0] * first + shares[1] * second


COMPRESSIONS: dict[str, Callable[[Ranks, Compression], LossyCarrier]] = {
    "powersgd": PowerSGDCarrier,
    "topk": TopKCarrier,
    "adasum": AdasumCarrier,
}
"""The carriers, by the name that ``gradient_compression`` takes."""
