"""The forms in which rows of varying length reach a model, as the parameters of its ``forward`` ask by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.errors import ConfigError
from sparkdl.models.signature import COMPANIONS, Call, Form

_BESIDE_ONE: dict[str, Form] = {
    "mask": "mask",
    "attention_mask": "mask",
    "padding_mask": "padding_mask",
    "key_padding_mask": "padding_mask",
    "src_key_padding_mask": "padding_mask",
    "lengths": "lengths",
    "offsets": "offsets",
    "jagged": "jagged",
}


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a model is called with once."""

    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(call: Call, named: Mapping[str, Any], beside: Collection[str] = ()) -> Arguments:
        """Arrange the inputs of a model.

        Args:
            call: its calling convention.
            named: its inputs, in order.
            beside: those that go by keyword where the others go by position: masks, lengths, offsets.
        """
        if call == "dict":
            return Arguments((dict(named),))
        if call == "keywords":
            return Arguments((), named)
        first = tuple(value for name, value in named.items() if name not in beside)
        return Arguments(first, {name: named[name] for name in beside})

    def to(self, device: torch.device) -> Arguments:
        """The arguments on another device."""

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: argument.to(device) for name, argument in value.items()}
            return value.to(device)

        return Arguments(
            tuple(map(moved, self.positional)), {name: moved(argument) for name, argument in self.named.items()}
        )


def parameters_of(model: torch.nn.Module) -> list[inspect.Parameter]:
    """The parameters of a model's ``forward``."""
    return list(inspect.signature(model.forward).parameters.values())


def asked_forms(
    parameters: Sequence[inspect.Parameter],
    columns: Collection[str],
    *,
    sole: str | None = None,
    taken: Collection[str] = (),
) -> dict[str, dict[str, Form]]:
    """Which parameters ask for which form of which column.

    Training, the checks before it and scoring all call this, so that one model is fed alike everywhere. A column
    ``tokens`` whose rows differ in length is handed over as

        tokens, tokens_mask            (rows, longest) padded with zeros; bool (rows, longest), True at an element
        tokens, tokens_padding_mask    the same, True where there is none: as torch.nn.MultiheadAttention takes it
        tokens, tokens_lengths         int64 (rows,)
        tokens, tokens_offsets         (elements,), row behind row; int64 (rows,) where each starts: for nn.EmbeddingBag
        tokens_jagged                  a nested tensor, layout=torch.jagged

    The name of the padded tensor itself is free. With one such column the names ``mask``, ``attention_mask``,
    ``padding_mask``, ``key_padding_mask``, ``src_key_padding_mask``, ``lengths``, ``offsets`` and ``jagged`` do, too.

    Args:
        parameters: of ``forward``.
        columns: those whose rows may differ in length, or have elements that could.
        sole: the column that names such as ``mask`` speak of; None if there are several.
        taken: names that are inputs of their own, whatever they are called.

    Returns:
        by column, the form by parameter; nothing for a column that no parameter asks for.
    """
    names = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} - set(taken)
    forms_by_column: dict[str, dict[str, Form]] = {}
    for column in columns:
        stem = re.sub(r"\W", "_", column)
        form_by_name: dict[str, Form] = {
            f"{stem}_{form}": form for form in get_args(Form) if form in (*COMPANIONS, "jagged")
        }
        form_by_name[f"{stem}__valid"] = "mask"  # what the loader of batches calls it
        if column == sole:
            form_by_name |= _BESIDE_ONE
        forms = {name: form for name, form in form_by_name.items() if name in names}
        if forms:
            forms_by_column[column] = forms
    return forms_by_column


def value_form(asked: Mapping[str, Form]) -> Form:
    """The form in which the column itself goes, beside what else is asked for."""
    forms = set(asked.values())
    return "jagged" if "jagged" in forms else "flat" if "offsets" in forms else "padded"


def remedy(column: str) -> str:
    """What somebody can do whose model takes a column of varying lengths without a mask."""
    stem = re.sub(r"\W", "_", column)
    return (
        f"let forward take {stem}_mask, {stem}_lengths, {stem}_offsets or {stem}_jagged, or give all rows one length "
        "n, [-1, n] in input_shapes"
    )


def check_batch_norm(model: torch.nn.Module) -> None:
    """Refuse batch norm that keeps no running statistics: what it says of a row depends on the rows beside it.

    Raises:
        ConfigError: names the layer.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is None:
            raise ConfigError(
                f"the layer {name or type(model).__name__} ({type(layer).__name__}) keeps no running statistics, so "
                "that a prediction would depend on the rows beside it: leave track_running_stats=True"
            )


def formed(form: Form, padded: torch.Tensor, valid: torch.Tensor | None) -> Any:
    """Make one argument of a column.

    Args:
        form: what is asked for; empty returns ``padded``.
        padded: (rows, longest, ...), zeros where a row has no element.
        valid: (rows, longest) bool, True where it has one; None if every row has all.
    """
    if not form:
        return padded
    if valid is None:
        valid = torch.ones(padded.shape[:2], dtype=torch.bool, device=padded.device)
    if padded.shape[1] == 0:  # rows without any element: one of padding, since few operations take a width of 0
        padded, valid = padded.new_zeros((len(padded), 1, *padded.shape[2:])), valid.new_zeros((len(padded), 1))
    if form in ("padded", "mask", "padding_mask"):
        return padded if form == "padded" else valid if form == "mask" else ~valid
    if form == "flat":
        return padded[valid]
    lengths = valid.sum(1)
    if form == "lengths":
        return lengths
    ends = lengths.cumsum(0)
    if form == "offsets":
        return ends - lengths
    return torch.nested.nested_tensor_from_jagged(padded[valid], torch.cat([ends.new_zeros(1), ends]))
