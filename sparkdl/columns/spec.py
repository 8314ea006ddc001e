"""The dtype and shape of one tensor of a batch, and what became of its columns on the way."""

from __future__ import annotations

from dataclasses import dataclass

LOGICAL = ("", "date", "timestamp", "timestamp_ntz", "string")
"""What numbers can stand for; see ``TensorSpec.logical``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of every batch: a field of the shard files' Arrow schema, of the same name.

    It says what the type table and the user's layout decided; writers, readers and scoring agree on it.

    Attributes:
        name: of the tensor and of the Arrow field.
        dtype: numpy's name of an element (``"float32"``, ``"int64"``, ``"float16"``), ``"bool"`` (stored as one
            uint8 an element), or ``"binary"`` for byte strings.
        shape: shape of one row: ``()`` for a scalar, ``(40,)`` for packed columns or a vector, ``(3, 4)`` for a matrix;
            for a ragged tensor the shape of one element of its variable dimension.
        ragged: whether the length of the first dimension varies by row.
        stored_as_list: the files hold a list of varying length although ``shape`` is fixed: that all rows are equally
            long was only known when the last one was written.
        columns: the source columns, in the order of the last dimension for packed ones.
        role: ``"feature"``, ``"label"`` or ``"mask"``.
        logical: what the numbers mean where the dtype does not say it: ``""``, ``"date"`` (days since 1970),
            ``"timestamp"`` (microseconds since 1970, UTC), ``"timestamp_ntz"``, ``"string"`` (dictionary codes).
        nulls: what was done with nulls: ``"error"`` (there are none), ``"fill"`` or ``"mask"``.
        fill: the values that stand for null, one a column.
        mask_of: for a mask, the name of the tensor whose valid elements (rows, if ragged or binary) it marks with 1.
        dictionary: for strings, the values in the order of their codes; empty otherwise.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    ragged: bool = False
    stored_as_list: bool = False
    columns: tuple[str, ...] = ()
    role: str = "feature"
    logical: str = ""
    nulls: str = "error"
    fill: tuple[float, ...] = ()
    mask_of: str | None = None
    dictionary: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "fill", tuple(self.fill))
        object.__setattr__(self, "dictionary", tuple(self.dictionary))
