"""The recipe by which a bundle's model is rebuilt: its choice at saving, its proof, and the rebuilding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from sparkdl.documents.tensors import tensor_facts
from sparkdl.documents.typed import as_json
from sparkdl.errors import BundleError
from sparkdl.models import importing, structure
from sparkdl.models.adjusted import adjusted
from sparkdl.models.bounded_build import bounded_build
from sparkdl.models.calling import Arguments
from sparkdl.models.folder import MAX_BYTES, PICKLE, WEIGHTS, Recipe
from sparkdl.models.trust import OWN
from sparkdl.models.weights import check_unsaved_state, load_weights
from sparkdl.nn.modes import mode_of
from sparkdl.storage import Storage


def recipe_of(model: nn.Module, factory: Any, arguments: Mapping[str, Any] | None, example: Any) -> Recipe:
    """Choose how ``model`` will be rebuilt, in the order that ``save_bundle`` documents.

    Raises:
        BundleError: there is no way without code.
    """
    kind = type_before_parametrizations(model)
    if factory is None and arguments is not None:
        factory = kind
    make_arguments = getattr(model, "bundle_arguments", None)
    if factory is None and callable(make_arguments):
        factory, arguments = kind, make_arguments()
    if factory is not None:
        argument_values = dict(arguments or {})
        plain = as_json(f"arguments={argument_values}", argument_values, BundleError, MAX_BYTES)
        return Recipe(kind="import", target=importing.path_of(factory), arguments=plain)
    try:
        return Recipe(kind="structure", tree=structure.describe(model))
    except BundleError as refusal:
        if example is None or kind.__module__.startswith("torch."):
            raise
        # its own class: attributes may not mean what the arguments meant, so only the example's outputs decide
        try:
            recovered = structure.recovered_arguments(model)
            return Recipe(kind="import", target=importing.path_of(kind), arguments=recovered)
        except BundleError as second:
            raise second from refusal


def prove(model: nn.Module, recipe: Recipe, folder: Storage, example: Any) -> None:
    """Rebuild the model from ``folder`` and compare it with the original.

    Raises:
        BundleError: tensors outside the state differ, or the answer to ``example``, or there is none.
    """
    package = recipe.target.partition(":")[0]
    again = rebuilt(recipe, folder, [package] if package else ()).eval()
    check_unsaved_state(model, again)
    if recipe.kind == "structure":
        if repr(again) != repr(model):
            raise BundleError(
                "the model rebuilt from its structure prints differently from the original: "
                "give factory= and arguments=, or allow_pickle=True"
            )
        setting = structure.other_setting(model, again)
        if setting is not None:
            raise BundleError(
                f"the model rebuilt from its structure has another {setting!r} than the original: "
                "give factory= and arguments=, or allow_pickle=True"
            )
    if example is not None:
        device = _device(model)
        with torch.inference_mode():
            try:
                first, second = _call(model, example, device), _call(again.to(device), example, device)
            except Exception as cause:
                raise BundleError(
                    "the model, or the one rebuilt from it, cannot be called with the example "
                    f"({type(cause).__name__}: {cause}): give factory= and the arguments= it was made with, or "
                    "allow_pickle=True"
                ) from cause
        if not _same(first, second):
            raise BundleError(
                "the rebuilt model answers the example differently from the original: give factory= and the arguments= "
                "it was made with, or allow_pickle=True"
            )


def repeats(model: nn.Module, example: Any) -> bool:
    """Whether a model can be called with an example, and says the same when it is asked once more: chance says other.

    Args:
        model: is asked in evaluation mode.
        example: as ``prove`` takes it.
    """
    with mode_of(model, training=False), torch.inference_mode():
        try:
            first, second = (_call(model, example, _device(model)) for _ in range(2))
            return _same(first, second)
        except Exception:  # whatever a forward of somebody's own raises
            return False


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _call(model: nn.Module, example: Any, device: torch.device) -> Any:
    if isinstance(example, Arguments):
        example = example.to(device)
        return model(*example.positional, **example.named)
    if isinstance(example, tuple):
        return model(*(item.to(device) for item in example))
    if isinstance(example, Mapping):
        return model({name: item.to(device) for name, item in example.items()})
    return model(example.to(device))


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and (first.shape, first.dtype) == (second.shape, second.dtype)
            and (_rounded_alike(first, second) if first.is_floating_point() else torch.equal(first, second))
        )
    if isinstance(first, Mapping):
        return set(first) == set(second) and all(_same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def _rounded_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Weights that are read from a file lie elsewhere in memory, where sums may be rounded otherwise."""
    rounding = 16 * torch.finfo(first.dtype).eps
    largest = first.abs().nan_to_num(0, 0, 0).max() if first.numel() else 0
    return torch.allclose(first, second, rtol=rounding, atol=rounding * float(largest), equal_nan=True)


def rebuilt(recipe: Recipe, folder: Storage, trusted: Sequence[str]) -> nn.Module:
    """Make the model of a recipe, with the weights that lie in ``folder``.

    torch's own layers and sparkdl's networks, which need no word of the reader's, are built on the meta device, and
    get memory only once their tensors are known to be those of the weights' file.

    Args:
        recipe: of ``bundle.json``.
        folder: on this machine.
        trusted: packages that may be imported.

    Raises:
        BundleError: it cannot be made here.
        IntegrityError: the weights cannot be read, or the recipe holds what none does.
    """
    if recipe.kind == "pickle":
        return _unpickled(folder.child(PICKLE))
    weights = folder.child(WEIGHTS).local_path()
    assert weights is not None
    tensors = len(tensor_facts(weights)) + len(recipe.weights.aliases)

    def made() -> nn.Module:
        if recipe.kind == "structure":
            model = structure.rebuild(recipe.tree)
        else:
            is_own_layer = own_layer(recipe.target)
            arguments = structure.checked_arguments(recipe.arguments) if is_own_layer else recipe.arguments
            model = importing.build(recipe.target, arguments, trusted)
        return structure.parametrize_again(model, recipe.parametrizations)

    if recipe.kind == "structure" or own_layer(recipe.target) or recipe.target.partition(":")[0] == OWN:
        model = bounded_build(made, tensors)
    else:
        with torch.random.fork_rng(devices=[]):
            model = made()
    return adjusted(load_weights(model, weights, recipe.weights), recipe.adjustments)


def own_layer(target: str) -> bool:
    """Whether an import path is that of one of torch's own layers, which is built without a word of the reader's.

    Raises:
        BundleError: it lies in ``torch.nn`` and is no layer.
    """
    if not target.startswith(("torch.nn:", "torch.nn.")):
        return False
    kind = structure.layer_class(target.rpartition(":")[2])
    if f"{kind.__module__}:{kind.__qualname__}" != target:
        raise BundleError(f"{target} is none of torch.nn's layers: publish the model again")
    return True


def _unpickled(file: Storage) -> nn.Module:
    with file.open_input() as source:
        try:
            model = cloudpickle.load(source)
        except ImportError as cause:
            raise BundleError(f"the pickled model needs {cause.name}, not installed here: install it") from cause
    if not isinstance(model, nn.Module):
        raise BundleError(f"{PICKLE} holds a {type(model).__name__}, not a torch.nn.Module: publish the model again")
    return model
