"""The inputs and outputs of a published model, as plain values that JSON can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sparkdl.columns.spec import LOGICAL
from sparkdl.config import require

Call = Literal["positional", "dict", "keywords"]
"""How a model is called: ``model(x, y)``, ``model({"x": x, "y": y})`` or ``model(x=x, y=y)``."""

Form = Literal["", "padded", "flat", "jagged", "mask", "padding_mask", "lengths", "offsets"]
"""The values themselves, and what may come beside them; empty for rows that all have one shape."""

COMPANIONS: tuple[Form, ...] = ("mask", "padding_mask", "lengths", "offsets")

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorField:
    """One tensor that enters or leaves a model.

    Attributes:
        name: of the tensor; an output's name is also the stem of its column.
        dtype: torch's name of the element type.
        shape: of one row, without the batch: ``()`` for a number, ``(n,)`` for a vector; None for a length that varies
            between rows.
        columns: of an input: the table's columns it is packed from, in order.
        form: of an input of varying length: what the model gets of it, see ``models.calling``.
        of: of an input that comes beside another one, such as its mask: that input's name; it has no columns.
        logical: of an input: what its numbers stood for in training, as ``columns.spec.TensorSpec`` says it; None where
            nobody has told, and any type that gives numbers is taken.
    """

    name: str
    dtype: str = "float32"
    shape: tuple[int | None, ...] = ()
    columns: tuple[str, ...] = ()
    form: Form = ""
    of: str = ""
    logical: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.name), "a tensor has an empty name: give it one")
        require(
            self.dtype in _DTYPES,
            f"tensor {self.name!r} has dtype {self.dtype!r}, not one of {_DTYPES}: use one of these",
        )
        require(
            all(size is None or 0 < size < 2**40 for size in self.shape),
            f"tensor {self.name!r} has shape {self.shape}: sizes are above 0, or None where they vary",
        )
        require(
            self.form in get_args(Form), f"tensor {self.name!r} has form {self.form!r}, not one of {get_args(Form)}"
        )
        require(
            self.logical in (None, *LOGICAL),
            f"tensor {self.name!r} has logical {self.logical!r}, not one of {LOGICAL}: use one of these",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """How a model is fed and what it answers.

    Attributes:
        inputs: in the order of the model's arguments. What comes beside an input of varying length has no columns and
            names that input: ``of``; it goes by keyword where the others go by position. ``<name>__valid`` without
            columns is the mask of an input in any case, True where a row has an element.
        outputs: in the order in which the model returns them; a model that returns a dict is read by these names.
        call: how the inputs are passed.
        labels: the label columns that it was trained on, or that its user calls so: one an output, by position.
    """

    inputs: tuple[TensorField, ...]
    outputs: tuple[TensorField, ...]
    call: Call = "positional"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.inputs) and bool(self.outputs), "a signature needs at least one input and one output: add it")
        require(self.call in get_args(Call), f"call={self.call!r} is not one of {get_args(Call)}: choose one of these")
        for kind, fields in (("input", self.inputs), ("output", self.outputs)):
            names = [field.name for field in fields]
            double = sorted({name for name in names if names.count(name) > 1})
            require(not double, f"{kind} names {double} appear twice: name each tensor once")
        ragged = [field.name for field in self.outputs if None in field.shape]
        require(
            not ragged,
            f"outputs {ragged} are of varying length, which would depend on the longest row of a batch: let the model "
            "return as many numbers for every row, and say how many in the shape",
        )
        bare = [field.name for field in self.inputs if not field.columns and self.owner(field) is None]
        require(not bare, f"inputs {bare} name no columns: say which columns each is packed from")

    def owner(self, field: TensorField) -> TensorField | None:
        """The input beside which ``field`` comes; None for one that is packed from columns of its own."""
        name = field.of or field.name.removesuffix("__valid")
        return next(
            (candidate for candidate in self.inputs if candidate.name == name != field.name and candidate.columns), None
        )

    @property
    def columns(self) -> list[str]:
        """Every column that scoring reads, once, in order."""
        return list(dict.fromkeys(column for field in self.inputs for column in field.columns))

    @property
    def answers(self) -> list[str]:
        """What each output is called in a table: its label, or its own name where no label is known."""
        has_labels = len(self.labels) == len(self.outputs)
        return list(self.labels) if has_labels else [field.name for field in self.outputs]
