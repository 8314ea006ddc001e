"""A model's state as one safetensors file, and back by mapping it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from sparkdl.documents.tensors import TensorFacts, map_tensors, tensor_facts
from sparkdl.errors import BundleError
from sparkdl.models.folder import WeightFacts


def save_weights(model: nn.Module, path: Path) -> WeightFacts:
    """Write the state of ``model``; return what ``load_weights`` needs besides.

    The file holds each distinct tensor once; what is returned has the names that share one.

    Raises:
        BundleError: the state holds something other than tensors, or a type that safetensors does not know.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    channels_last = False
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise BundleError(
                f"the model's state holds {name!r}, a {type(value).__name__}: keep such extra state in buffers, or use "
                "allow_pickle=True"
            )
        tensor = value.detach()
        key = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if tensor.numel() and key in owners:
            aliases[name] = owners[key]
            continue
        owners[key] = name
        if tensor.dim() == 4 and not tensor.is_contiguous():
            channels_last |= tensor.is_contiguous(memory_format=torch.channels_last)
        tensors[name] = _alone(tensor)
    try:
        save_file(tensors, path)
    except (SafetensorError, KeyError, ValueError, OSError) as cause:
        if isinstance(cause, OSError) or "(os error" in str(cause):  # safetensors has no type of its own for these
            raise BundleError(
                f"the weights cannot be written to {path}: {cause}; free space or choose another place"
            ) from cause
        raise BundleError(f"the weights cannot be saved as safetensors: {cause}; cast them to a plain type") from cause
    return WeightFacts(aliases=aliases, channels_last=channels_last)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, contiguous, in memory of its own: safetensors refuses views of one another."""
    tensor = tensor.cpu().contiguous()
    owns_storage = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if owns_storage else tensor.clone()


def load_weights(model: nn.Module, path: Path, facts: WeightFacts) -> nn.Module:
    """Give ``model`` the tensors of the file, mapped, with tied ones tied again.

    There is no second copy in memory, and processes on one host share the file's pages.

    Names, shapes and types are compared with the file's header first; a model on the meta device takes no memory until
    they are found to agree.

    Raises:
        BundleError: the file's tensors are not the model's.
        IntegrityError: it cannot be read.
    """
    _compare(model, tensor_facts(path), facts.aliases)
    state = map_tensors(path)
    for name, owner in facts.aliases.items():
        state[name] = state[owner]
    model.load_state_dict(state, assign=True)
    for name, owner in facts.aliases.items():
        _tie(model, name, owner)
    empty = [name for name, tensor in _all_tensors(model).items() if tensor.is_meta]
    if empty:
        raise BundleError(f"the rebuilt model has tensors that no file holds, {empty[:3]}: give factory= of your own")
    floating = {value.dtype for value in state.values() if value.is_floating_point()}
    if len(floating) == 1:  # buffers that are not saved follow, as they did in the model that was saved
        model.to(floating.pop())
    if facts.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _compare(model: nn.Module, saved_facts: TensorFacts, aliases: Mapping[str, str]) -> None:
    unknown = [name for name, owner in aliases.items() if owner not in saved_facts or name in saved_facts]
    if unknown:
        raise BundleError(f"the tensors {unknown[:3]} are said to be others, which the file lacks: save it again")
    all_facts = {**saved_facts, **{name: saved_facts[owner] for name, owner in aliases.items()}}
    expected = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name in [*expected, *all_facts]:
        own_shape = tuple(expected[name].shape) if name in expected else None
        saved_shape, saved_dtype = all_facts.get(name, (None, None))
        if own_shape != saved_shape:
            raise BundleError(
                f"the rebuilt model has {name!r} of shape {own_shape}, the saved weights {saved_shape}: "
                "rebuild it with the arguments it was trained with"
            )
        own_dtype = expected[name].dtype
        if saved_dtype != own_dtype and not (
            saved_dtype is not None and saved_dtype.is_floating_point and own_dtype.is_floating_point
        ):
            raise BundleError(  # a model may have been cast, from one type of floating point to another
                f"the rebuilt model has {name!r} of {own_dtype}, the saved weights {saved_dtype}: save it again"
            )


def _tie(model: nn.Module, name: str, owner: str) -> None:
    """Let ``name`` be the same parameter object as ``owner``, so that training would move both."""
    prefix, _, leaf = name.rpartition(".")
    holder, source = model.get_submodule(prefix), _get(model, owner)
    table = holder._parameters if leaf in holder._parameters else holder._buffers
    table[leaf] = source  # type: ignore[assignment]


def _get(model: nn.Module, name: str) -> torch.Tensor:
    prefix, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(prefix), leaf)
    return tensor


def check_unsaved_state(model: nn.Module, again: nn.Module) -> None:
    """Refuse a model whose tensors outside its state a rebuilt one does not have alike.

    Raises:
        BundleError: names the first such tensor.
    """
    saved = set(model.state_dict())
    for name, tensor in _all_tensors(model).items():
        if name in saved:
            continue
        rebuilt = _all_tensors(again).get(name)
        if rebuilt is None or rebuilt.shape != tensor.shape or not _equal(tensor.cpu(), rebuilt.cpu()):
            raise BundleError(
                f"the model holds the tensor {name!r} outside its state_dict, and a rebuilt one has another value "
                "there: register it as a persistent buffer, or use allow_pickle=True"
            )


def _all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{prefix}.{name}".lstrip(".")] = value
    return tensors


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal values, NaN equal to NaN; types may differ, as a model cast to another type rebuilds its own buffers."""
    if one.is_floating_point() and other.is_floating_point():
        return torch.allclose(one, other.to(one.dtype), rtol=0, atol=0, equal_nan=True)
    return torch.equal(one, other)
