"""The plan by which the inputs of a model are put together from columns; no Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkdl.errors import SchemaError
from sparkdl.features.fitted import Features
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.inputs import InputPlan, Part

_MEANT = {
    "": "plain numbers",
    "date": "dates",
    "timestamp": "moments (timestamp)",
    "timestamp_ntz": "times on the clock (timestamp_ntz)",
    "string": "codes of strings",
}


def plan_inputs(signature: Signature, features: Features | None) -> tuple[InputPlan, ...]:
    """Plan a signature's inputs where each of its columns stands for itself.

    Args:
        signature: of the model.
        features: that make its columns, if they are not the table's.

    Raises:
        SchemaError: the model needs a column that its features do not make.
    """
    made_columns = signature.columns if features is None else [feature.name for feature in features.inputs]
    absent = [name for name in signature.columns if name not in made_columns]
    if absent:
        raise SchemaError(
            f"the model needs the inputs {absent}, its features make {made_columns}: publish it with its own"
        )
    return tuple(plan_input(field, signature, {}, {}) for field in signature.inputs)


def plan_input(
    field: TensorField,
    signature: Signature,
    where: Mapping[str, tuple[str, int]],
    packs: Mapping[str, Sequence[str]],
) -> InputPlan:
    """Plan one input.

    Args:
        field: of the signature.
        signature: whole.
        where: by column that travels in a pack, the pack and its place there.
        packs: by pack, its columns.

    Raises:
        SchemaError: the model would see which rows are scored together, or the column cannot be what it takes.
    """
    owner = None if field.columns else signature.owner(field)
    if owner is not None:
        return InputPlan(field, (), of=owner.name)
    if None in field.shape and len(field.columns) != 1:
        raise SchemaError(
            f"input {field.name!r} has rows of varying length and comes from {list(field.columns)}: name its one column"
        )
    alone = field.form in ("", "padded") and not any(
        signature.owner(other_input) is field for other_input in signature.inputs
    )
    if None in field.shape and alone:
        raise SchemaError(
            f"input {field.name!r} has rows of varying length, and the model gets no mask: what it says of a row would "
            "depend on the rows beside it; describe a mask, lengths or offsets in the signature, with "
            f"TensorField(form='mask', of={field.name!r}, ...)"
        )
    parts: list[Part] = []
    for name in field.columns:
        column, position = where.get(name, (name, -1))
        if parts and position >= 0 and parts[-1].column == column:
            last = parts[-1]
            parts[-1] = Part(column, (*(last.picked or ()), position), (*last.names, name))
        else:
            parts.append(Part(column, (position,) if position >= 0 else None, (name,)))
    return InputPlan(field, tuple(_whole(part, packs) for part in parts))


def _whole(part: Part, packs: Mapping[str, Sequence[str]]) -> Part:
    """A part that picks every column of its pack in order takes it as it is."""
    everything = tuple(range(len(packs.get(part.column, ()))))
    return Part(part.column, None, part.names) if part.picked == everything else part


def check_meaning(field: TensorField, column: str, meaning: str, type_name: str) -> None:
    """Refuse a column whose numbers stand for something else than those that the model was trained on.

    Args:
        field: the input that takes the column.
        column: its name.
        meaning: what its numbers stand for, as ``TensorField.logical``; empty for themselves.
        type_name: of the column, for the message.

    Raises:
        SchemaError: it is another one.
    """
    if field.logical == meaning == "string":
        raise SchemaError(
            f"column {column!r} holds strings, and the model was trained on their codes, which the manifest of its "
            "shards lists and the model does not carry: give a column with the codes"
        )
    if field.logical is not None and meaning != ("" if field.logical == "string" else field.logical):
        raise SchemaError(
            f"column {column!r} is of type {type_name}, and the model was trained on {_MEANT[field.logical]}: cast the "
            "column to what it was in training"
        )
