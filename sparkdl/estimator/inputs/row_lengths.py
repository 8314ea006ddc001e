"""Whether a model can take rows of varying length, and whether the rows of a column vary at all.

Enters: the model, its inputs, and the statistics that the shards' writers counted. Leaves: the inputs, each with the
one length of its rows where the model needs one and all rows have it; or a ``ConfigError`` that names both lengths.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch

from sparkdl.columns.spec import TensorSpec
from sparkdl.errors import ConfigError
from sparkdl.estimator.inputs.views import InputView
from sparkdl.models.calling import asked_forms, parameters_of, remedy
from sparkdl.shards.manifest import Manifest

__all__ = ["check_forms", "is_varying", "lengths_of", "sole", "with_lengths", "wants_dict"]


def is_varying(spec: TensorSpec) -> bool:
    """Whether rows of a tensor may differ in length, by its type."""
    return spec.ragged or spec.dtype == "binary"


def lengths_of(spec: TensorSpec, manifests: Sequence[Manifest]) -> tuple[int, int] | None:
    """Elements, or bytes, of the shortest and of the longest row of some sets; None where nobody counted."""
    found = [manifest.statistics.get(spec.columns[0]) for manifest in manifests if manifest.rows]
    ends = [(one.min, one.max) if spec.dtype == "binary" else (one.min_length, one.max_length) for one in found if one]
    known = [(int(least), int(most)) for least, most in ends if least is not None and most is not None]
    if not known or len(known) < len(found):
        return None
    return min(least for least, _ in known), max(most for _, most in known)


def wants_dict(parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether a model takes one dict, in which it finds the masks and lengths of all columns."""
    if not parameters:
        return False
    said = f"{parameters[0].annotation} {parameters[0].name}".lower()
    return "dict" in said or "mapping" in said


def sole(columns: Sequence[str]) -> str | None:
    """The column that a parameter called ``mask`` speaks of."""
    return columns[0] if len(columns) == 1 else None


def with_lengths(
    model: torch.nn.Module,
    views: Sequence[InputView],
    manifests: Sequence[Manifest],
    *,
    every: bool = False,
) -> tuple[InputView, ...]:
    """Give the inputs whose rows all have one length that length, where the model does not ask for masks or the like.

    Args:
        model: any.
        views: its inputs.
        manifests: of the sets that it will see.
        every: fix them even if the model asks.

    Raises:
        ConfigError: rows differ in length, and the model cannot tell their elements from padding.
    """
    specs = {view.name: manifests[0].tensor(view.tensor) for view in views}
    varying = [view.name for view in views if is_varying(specs[view.name]) and view.shape is None]
    sizes: dict[str, int] = {}
    for name in varying if every else _unasked(model, varying):
        least, most = lengths_of(specs[name], manifests) or (0, 0)
        if least == most > 0:
            sizes[name] = most
    _check(
        model, [name for name in varying if name not in sizes], {n: lengths_of(specs[n], manifests) for n in varying}
    )
    return tuple(
        replace(view, shape=(-1, sizes[view.name], *specs[view.name].shape)) if view.name in sizes else view
        for view in views
    )


def check_forms(model: torch.nn.Module, varying: Sequence[str]) -> None:
    """Refuse a model that cannot tell the elements of a column from its padding.

    Args:
        model: any; one that takes a dict finds the masks and lengths of all columns in it.
        varying: columns whose rows may differ in length.

    Raises:
        ConfigError: names the column and what the model could take.
    """
    _check(model, varying, {})


def _unasked(model: torch.nn.Module, varying: Sequence[str]) -> list[str]:
    parameters = parameters_of(model)
    if wants_dict(parameters):
        return []
    asked = asked_forms(parameters, varying, sole=sole(varying))
    return [name for name in varying if name not in asked]


def _check(model: torch.nn.Module, varying: Sequence[str], lengths: dict[str, tuple[int, int] | None]) -> None:
    for name in _unasked(model, varying):
        found = lengths.get(name)
        what = f"have {found[0]} to {found[1]} elements" if found else "may differ in length"
        takes = ", ".join(p.name for p in parameters_of(model))
        raise ConfigError(
            f"rows of {name!r} {what}, and forward({takes}) of {type(model).__name__} cannot tell their elements from "
            f"padding: {remedy(name)}"
        )
