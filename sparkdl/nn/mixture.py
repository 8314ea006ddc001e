"""A mixture of experts: each token goes through the few of many small networks that a gate chooses for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.nn import functional

from sparkdl.errors import ConfigError, DataError
from sparkdl.observe import emit, logger

_ODDS_STEP = 2.0**-16
_ODDS_LIMIT = 2**40  # a code has 42 bits for the odds, and those above them for the expert

Parameters = Sequence[torch.Tensor]
Run = Callable[[torch.Tensor, list[int]], torch.Tensor]
"""A function from rows sorted by expert, ``(rows, features)``, and how many each expert has, to their outputs."""


class TokenRanks(Protocol):
    """The ranks whose tokens together are those of the global batch; a collective of several ranks is one."""

    def gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's ``rows``, which may differ in their first dimension alone."""
        ...


class MixtureOfExperts(torch.nn.Module):
    """A layer that sends each token through ``k`` of its experts and adds their outputs up, weighted by the gate.

    Every position of the input but the last dimension is a token. The gate is linear and without noise, so the layer is
    deterministic; it computes in float32 at least, also under autocast (Fedus et al. 2022, section 2.4). With ``k`` of
    1 an output is multiplied by its probability (Fedus et al.), else by the softmax over the chosen experts' logits
    (Shazeer et al. 2017, section 2.1). An expert is ``activation(x @ weight_in + bias_in) @ weight_out + bias_out``.

    In training an expert takes ``ceil(capacity_factor * k * tokens / experts)`` tokens of the global batch. Of more it
    takes those for which the gate gives it the best odds, and to the others it contributes zero: they pass by where
    the model adds its input, ``x + mixture(x)``. Tokens whose odds are equal to 2**-16 of their logarithm share their
    fate: where they stand at the limit all of them are taken, so that a choice depends neither on the order of rows nor
    on who computes them, and equal tokens may take an expert beyond its capacity. In evaluation nothing is dropped, and
    no output depends on the other rows.

    A training forward pass leaves ``auxiliary_loss``, the balance loss of Fedus et al., ``balance_weight * experts *
    sum(f * P)``: ``f`` is each expert's share of the choices, before any are dropped, and ``P`` its mean probability.
    Training by sparkdl adds it to the batch's loss; a ``train_step`` or a loop of the user's own adds it itself.

    All of this is of the global batch where sparkdl trains: the ranks exchange 8 bytes a choice in each training pass,
    under any strategy. N ranks therefore train as one does, as far as each row has equally many tokens, which the
    weights of a ragged tail rest on, and as no choice hangs on the rounding of a logit. A pipeline sees one micro-batch
    after the other, and takes layers without a capacity, whose input has the rows first: ``(rows, ..., features)``.
    Elsewhere, as under DistributedDataParallel, the layer knows the tokens of its own process alone. A module that is
    called twice in one forward pass keeps the balance loss of the later call.

    ``torch.export`` works in evaluation mode; the exported graph sends every token through every expert.

    Sources: Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017; Lepikhin et al., "GShard", ICLR 2021;
    Fedus et al., "Switch Transformers", JMLR 2022; the priority by odds instead of position is that of Riquelme et al.,
    "Scaling Vision with Sparse Mixture of Experts", NeurIPS 2021, section 4, for each expert by itself.

    Args:
        features: of a token.
        hidden: width of an expert's inner layer.
        experts: number of experts.
        out_features: of an output; ``features`` by default.
        k: experts a token goes through.
        capacity_factor: tokens an expert takes in training, as a multiple of an even share; None drops nothing.
        balance_weight: of the balance loss; 0 leaves it out.
        activation: between an expert's two layers, shared by all experts and elementwise; GELU by default.
        device: where the parameters are made.
        dtype: of the parameters.

    Attributes:
        gate: a ``torch.nn.Linear`` without bias.
        weight_in: ``(experts, features, hidden)``.
        bias_in: ``(experts, hidden)``.
        weight_out: ``(experts, hidden, out_features)``.
        bias_out: ``(experts, out_features)``.
        auxiliary_loss: the weighted balance loss of this rank's tokens in the newest training pass, of which the mean
            over the ranks, weighted by their rows, is the global batch's; None before the first and once it is taken.
        gather_rows: gives every rank's rows of the tensors of one, for the ranks whose tokens together are a global
            batch; None: this process alone. See ``share_tokens``.
        runner: what runs the experts where they lie on other ranks; None runs them here.
        counted_rows: how many of a pass's rows, from the first on, have tokens that count: see ``counting``.
        balance: what adds the balance loss of a batch that comes in several passes; None leaves ``auxiliary_loss``.

    Raises:
        ConfigError: a size is below 1, ``k`` exceeds ``experts``, or a factor or weight is out of range.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        experts: int,
        *,
        out_features: int | None = None,
        k: int = 2,
        capacity_factor: float | None = 1.25,
        balance_weight: float = 0.01,
        activation: torch.nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = features if out_features is None else out_features
        sizes = {"features": features, "hidden": hidden, "experts": experts, "out_features": out_features, "k": k}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name}={size} of a mixture of experts is below 1: give at least 1")
        if k > experts:
            raise ConfigError(f"k={k} exceeds the {experts} experts of the mixture: lower k or give it more experts")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ConfigError(
                f"capacity_factor={capacity_factor} is no positive number: give one, or None for no limit"
            )
        if not 0 <= balance_weight < math.inf:
            raise ConfigError(f"balance_weight={balance_weight} is no weight: give 0 or a positive number")
        self.features, self.hidden, self.experts, self.out_features = features, hidden, experts, out_features
        self.k, self.capacity_factor, self.balance_weight = k, capacity_factor, balance_weight
        self.gate = _Gate(features, experts, bias=False, device=device, dtype=dtype)
        self.weight_in = _parameter(experts, features, hidden, device=device, dtype=dtype)
        self.bias_in = _parameter(experts, hidden, device=device, dtype=dtype)
        self.weight_out = _parameter(experts, hidden, out_features, device=device, dtype=dtype)
        self.bias_out = _parameter(experts, out_features, device=device, dtype=dtype)
        self.activation = torch.nn.GELU() if activation is None else activation
        self.auxiliary_loss: torch.Tensor | None = None
        self.gather_rows: Callable[[torch.Tensor], list[torch.Tensor]] | None = None
        self.runner: Run | None = None
        self.counted_rows: int | None = None
        self.balance: BatchBalance | None = None
        self._tally: torch.Tensor | None = None  # how many choices were dropped, and of how many
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, each expert's as ``torch.nn.Linear`` draws its own."""
        self.gate.reset_parameters()
        for parameters, inputs in (
            ((self.weight_in, self.bias_in), self.features),
            ((self.weight_out, self.bias_out), self.hidden),
        ):
            for parameter in parameters:
                torch.nn.init.uniform_(parameter, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    def expert_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that have the experts as their first dimension, by name."""
        names = ("weight_in", "bias_in", "weight_out", "bias_out")
        return {name: getattr(self, name) for name in names}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of tokens.

        Args:
            inputs: ``(..., features)``, of a floating-point dtype; there may be no token at all.

        Returns:
            ``(..., out_features)``; under autocast in its dtype.

        Raises:
            DataError: the last dimension is not ``features``, or the numbers are integers.
        """
        if inputs.ndim == 0 or inputs.shape[-1] != self.features or not inputs.is_floating_point():
            raise DataError(
                f"a mixture of experts over {self.features} features got {inputs.dtype} of shape {tuple(inputs.shape)}:"
                f" give it floating-point tokens of shape (..., {self.features})"
            )
        tokens = inputs.reshape(-1, self.features)
        logits = self.gate(tokens)
        chosen_logits, chosen = logits.topk(self.k, dim=-1)  # (tokens, k)
        probabilities = logits.softmax(-1)
        weights = chosen_logits.softmax(-1) if self.k > 1 else probabilities.gather(-1, chosen)
        if torch.compiler.is_exporting():
            outputs = self._through_all(tokens, chosen, weights)
        else:
            taken, choices, counted = None, None, len(tokens)
            if self.counted_rows is not None:
                counted = self.counted_rows * (counted // inputs.shape[0]) if self.counted_rows else 0
            if self.training:
                taken, choices = self._limit(logits, chosen_logits, chosen, probabilities, counted)
            if counted < len(tokens):
                taken = torch.ones_like(chosen, dtype=torch.bool) if taken is None else taken
                taken[counted:] = False
            outputs = self._through_chosen(tokens, chosen, weights, taken)
            if self.balance is not None and choices is not None:
                outputs = self.balance.added_to(outputs, probabilities[:counted], choices)
        return outputs.reshape(*inputs.shape[:-1], self.out_features)

    def _limit(
        self,
        logits: torch.Tensor,
        chosen_logits: torch.Tensor,
        chosen: torch.Tensor,
        probabilities: torch.Tensor,
        counted: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the balance loss of the first ``counted`` tokens, and count what is dropped of them.

        Every rank that shares tokens calls it, one without tokens, too.

        Returns:
            Which choices are taken, ``(tokens, k)``, and how many chose each expert on all ranks, ``(experts,)``.
        """
        with torch.no_grad():
            codes = _codes(logits, chosen_logits, chosen)
            local = codes[:counted].flatten()
            all_codes = local if self.gather_rows is None else torch.cat(self.gather_rows(local))
            experts = torch.arange(self.experts + 1, device=codes.device) << 42
            ranked = all_codes.sort().values  # by expert, and within one from the worst odds to the best
            ends = torch.searchsorted(ranked, experts)
            choices = ends.diff()  # of each expert
            taken = torch.ones_like(chosen, dtype=torch.bool)
            if self.capacity_factor is not None and len(ranked):
                capacity = math.ceil(self.capacity_factor * len(ranked) / self.experts)
                least = ranked[(ends[1:] - capacity).clamp(min=0)]
                taken = (codes >= least[chosen]) | (choices <= capacity)[chosen]
        if counted:
            tally = torch.stack([(~taken[:counted]).sum(), torch.ones_like(chosen[:counted]).sum()])
            self._tally = tally if self._tally is None else self._tally + tally
        if self.balance is None:
            self.auxiliary_loss = logits.sum() * 0
            if counted:
                mean_probabilities = probabilities[:counted].sum(0) / counted
                balance = (choices.to(probabilities.dtype) / len(ranked) * mean_probabilities).sum()
                self.auxiliary_loss = self.balance_weight * self.experts * balance
        return taken, choices

    def _through_chosen(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, taken: torch.Tensor | None
    ) -> torch.Tensor:
        """Run each expert over the tokens that it takes."""
        expert_of = chosen if taken is None else chosen.masked_fill(~taken, self.experts)  # one behind the last: none
        expert_of = expert_of.flatten()
        counts = torch.bincount(expert_of, minlength=self.experts + 1)[: self.experts].tolist()
        order = expert_of.argsort(stable=True)[: sum(counts)]
        rows = tokens[order // self.k]
        outputs = self._run_here(rows, counts) if self.runner is None else self.runner(rows, counts)
        row_of = torch.full_like(expert_of, len(order))  # the row of zeros behind the others
        row_of[order] = torch.arange(len(order), device=order.device)
        outputs = torch.cat([outputs, outputs.new_zeros(1, self.out_features)])
        return (outputs[row_of.view_as(chosen)] * weights.unsqueeze(-1)).sum(1).to(outputs.dtype)

    def _run_here(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return run_experts(rows, counts, list(self.expert_parameters().values()), self.activation)

    def _through_all(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run every expert over every token, and choose afterwards: a graph has no sizes that data decide."""
        if self.training:
            raise ConfigError(
                "a mixture of experts in training mode depends on what an export does not have: call model.eval() first"
            )
        inner = self.activation(torch.einsum("ti,eih->teh", tokens, self.weight_in) + self.bias_in)
        outputs = torch.einsum("teh,eho->teo", inner, self.weight_out) + self.bias_out
        outputs = outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, self.out_features))
        return (outputs * weights.unsqueeze(-1)).sum(1).to(outputs.dtype)

    def take_dropped(self) -> tuple[int, int]:
        """How many choices were dropped, and of how many, in training since the last call: see ``take_dropped``."""
        dropped, choices = (0, 0) if self._tally is None else self._tally.tolist()
        self._tally = None
        return dropped, choices

    def extra_repr(self) -> str:
        """Describe the layer, as ``print(model)`` does."""
        return (
            f"{self.features}, {self.hidden}, experts={self.experts}, out_features={self.out_features}, k={self.k}, "
            f"capacity_factor={self.capacity_factor}, balance_weight={self.balance_weight}"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle is a plain layer of one process, without the graph of the newest pass."""
        passing = ("auxiliary_loss", "gather_rows", "runner", "counted_rows", "balance", "_tally")
        return {**self.__dict__, **dict.fromkeys(passing)}


class _Gate(torch.nn.Linear):
    """Logits, ``(tokens, experts)``, in float32 at least: bfloat16 would decide differently on other ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(torch.promote_types(input.dtype, self.weight.dtype), torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(input.to(wide), self.weight.to(wide))


class BatchBalance:
    """The balance loss of a batch whose tokens pass through a layer in several parts, all before the first backward.

    The backward pass of each part adds the loss's gradient to the layer's own, as the auxiliary loss of Megatron-LM
    (``MoEAuxLossAutoScaler``) does; which shares of the tokens chose each expert is known by then.

    Args:
        layer: whose tokens they are; it has this as its ``balance``.
    """

    def __init__(self, layer: MixtureOfExperts) -> None:
        self._weight, self._experts = layer.balance_weight, layer.experts
        self.begin(1.0)

    def begin(self, scale: torch.Tensor | float) -> None:
        """Begin a batch, of whose loss the gradient is multiplied by ``scale``."""
        self._scale = scale
        self._tokens = 0  # of this rank
        self._choices: torch.Tensor | float = 0.0  # by expert, of all ranks
        self._probabilities: torch.Tensor | float = 0.0  # by expert, added up over this rank's tokens

    def added_to(self, outputs: torch.Tensor, probabilities: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """Return ``outputs`` of one part, whose backward pass has the gradient of the balance loss, too.

        Args:
            outputs: of the layer.
            probabilities: of the tokens that count, ``(tokens, experts)``.
            choices: how many tokens of all ranks chose each expert, ``(experts,)``.
        """
        self._choices = self._choices + choices.to(probabilities.dtype)
        if not len(probabilities):
            return outputs
        self._tokens += len(probabilities)
        self._probabilities = self._probabilities + probabilities.detach().sum(0)
        balanced_outputs: torch.Tensor = _AddedGradient.apply(outputs, probabilities.sum(0), self._gradient)  # type: ignore[no-untyped-call]
        return balanced_outputs

    def _gradient(self) -> torch.Tensor:
        """The gradient of the loss, by the probabilities that are added up over this rank's tokens."""
        assert isinstance(self._choices, torch.Tensor)
        shares = self._choices / self._choices.sum()
        return self._weight * self._experts * self._scale * shares / self._tokens

    def loss(self) -> torch.Tensor | float:
        """The weighted balance loss of this rank's tokens, as ``auxiliary_loss`` is, without a graph or the scale."""
        if not self._tokens:
            return 0.0
        assert isinstance(self._choices, torch.Tensor)
        balance = (self._choices / self._choices.sum() * self._probabilities).sum() / self._tokens
        return self._weight * self._experts * balance


class _AddedGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outputs: torch.Tensor, sums: torch.Tensor, gradient: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        ctx.gradient = gradient
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradients[0], ctx.gradient(), None


def _parameter(*shape: int, device: torch.device | str | None, dtype: torch.dtype | None) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))


def _codes(logits: torch.Tensor, chosen_logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """A number for each choice, int64 ``(tokens, k)``, that sorts by expert and then by the odds of it.

    Odds order tokens as probabilities do, and go on doing so where those round to 1. They are rounded, since one token
    may get other last bits on another rank.
    """
    other_logits = logits.unsqueeze(1).expand(-1, chosen.shape[1], -1)
    other_logits = other_logits.scatter(-1, chosen.unsqueeze(-1), -math.inf).logsumexp(-1)
    odds = ((chosen_logits - other_logits) / _ODDS_STEP).nan_to_num(0.0).clamp(-_ODDS_LIMIT, _ODDS_LIMIT).round().long()
    return (chosen << 42) + (odds + _ODDS_LIMIT)


def run_experts(
    rows: torch.Tensor, counts: Sequence[int], parameters: Parameters, activation: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Run experts over rows that are sorted by expert.

    Args:
        rows: ``(rows, features)``.
        counts: how many of them each expert has.
        parameters: the four of ``MixtureOfExperts.expert_parameters``, of as many experts.
        activation: of the inner layer.

    Returns:
        ``(rows, out_features)``.
    """
    outputs = []
    # Indexing would give each expert a gradient of the size of all of them.
    by_expert = zip(*(parameter.unbind() for parameter in parameters), strict=True)
    parts = torch.split(rows, list(counts))
    for part, (weight_in, bias_in, weight_out, bias_out) in zip(parts, by_expert, strict=True):
        inner = activation(torch.addmm(bias_in, part, weight_in))
        outputs.append(torch.addmm(bias_out, inner, weight_out))
    return torch.cat(outputs)


def mixtures(model: torch.nn.Module) -> dict[str, MixtureOfExperts]:
    """Return the mixtures of experts in ``model`` by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}


def share_tokens(model: torch.nn.Module, ranks: TokenRanks | None) -> None:
    """Let the mixtures in ``model`` route the tokens of all ``ranks`` together; None: of this process alone."""
    layers = mixtures(model).values()
    # A compiler would leave an exchange out, or put it elsewhere, where it compiles another graph than other ranks do.
    gather_rows = torch.compiler.disable(ranks.gather_rows) if ranks is not None and layers else None  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.gather_rows = gather_rows


@contextmanager
def counting(layers: Iterable[MixtureOfExperts], rows: int | None) -> Iterator[None]:
    """Let the tokens of the first ``rows`` rows count in forward passes inside; None: those of all.

    The other rows stand in for none. Their tokens count neither for capacity nor for balance nor as dropped, no expert
    gets them, and the layers' outputs for them are zero. An input has the rows as its first dimension, unless all or
    none of them count.
    """
    layers = list(layers)
    for layer in layers:
        layer.counted_rows = rows
    try:
        yield
    finally:
        for layer in layers:
            layer.counted_rows = None


def stand_in(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Let forward passes inside be of rows that stand in for none: see ``counting``.

    A rank without rows takes part in what the others exchange by such a pass and its backward pass.
    """
    return counting(mixtures(model).values(), 0)


def take_dropped(model: torch.nn.Module) -> tuple[int, int]:
    """How many choices of an expert were dropped in training since the last call, and of how many; waits for a GPU.

    A token makes ``k`` choices in each layer. Both numbers are of this rank's tokens; their sums over the ranks that
    read different rows are the global ones. With activation checkpointing a choice counts in each of its passes.
    """
    counts = [layer.take_dropped() for layer in mixtures(model).values()]
    return sum(dropped for dropped, _ in counts), sum(choices for _, choices in counts)


def tell_dropped(
    model: torch.nn.Module,
    epoch: int,
    add_up: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
    *,
    tells: bool,
) -> None:
    """Say, where this rank tells, what share of an epoch's choices of an expert was dropped.

    Args:
        model: with mixtures of experts.
        epoch: the one that has ended.
        add_up: sums a tensor over the ranks, each row once; every rank calls this function.
        device: where ``add_up`` takes its tensors.
        tells: whether this rank tells.
    """
    dropped, choices = add_up(torch.tensor(take_dropped(model), dtype=torch.float64, device=device)).tolist()
    if dropped and tells:
        message = (
            f"epoch {epoch}: {dropped:.0f} of {choices:.0f} choices of an expert were beyond its capacity and dropped "
            f"({dropped / choices:.1%}): raise capacity_factor to drop fewer"
        )
        logger.info(message)
        emit("log", message=message)
