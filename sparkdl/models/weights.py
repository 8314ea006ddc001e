"""A model's state as one safetensors file, and back by mapping it.

Enters: a module. Leaves: a file that holds each distinct tensor once, and the names that share one. Loading maps the
file: no second copy in memory, and processes on one host share its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from sparkdl.errors import BundleError

__all__ = ["check_unsaved_state", "load_weights", "save_weights"]


def save_weights(model: nn.Module, path: Path) -> dict[str, Any]:
    """Write the state of ``model``; return what ``load_weights`` needs besides.

    Returns:
        ``{"aliases": {name: name that holds the tensor}, "channels_last": bool}``

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
    except (SafetensorError, KeyError, ValueError) as cause:
        raise BundleError(f"the weights cannot be saved as safetensors: {cause}; cast them to a plain type") from cause
    except OSError as cause:
        raise BundleError(
            f"the weights cannot be written to {path}: {cause}; free space or choose another place"
        ) from cause
    return {"aliases": aliases, "channels_last": channels_last}


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, contiguous, in memory of its own: safetensors refuses views of one another."""
    tensor = tensor.cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def load_weights(model: nn.Module, path: Path, facts: Mapping[str, Any]) -> nn.Module:
    """Give ``model`` the tensors of the file, mapped, with tied ones tied again.

    Raises:
        BundleError: the file's names or shapes are not the model's.
    """
    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    for name, owner in facts["aliases"].items():
        state[name] = state[owner]
    expected = {
        name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }
    found = {name: tuple(value.shape) for name, value in state.items()}
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            raise BundleError(
                f"the rebuilt model has {name!r} of shape {expected.get(name)}, the saved weights {found.get(name)}: "
                "rebuild it with the arguments it was trained with"
            )
    model.load_state_dict(state, assign=True)
    for name, owner in facts["aliases"].items():
        _tie(model, name, owner)
    floating = {value.dtype for value in state.values() if value.is_floating_point()}
    if len(floating) == 1:  # buffers that are not saved follow, as they did in the model that was saved
        model.to(floating.pop())
    if facts["channels_last"]:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _tie(model: nn.Module, name: str, owner: str) -> None:
    """Let ``name`` be the same parameter object as ``owner``, so that training would move both."""
    prefix, _, leaf = name.rpartition(".")
    holder, source = model.get_submodule(prefix), _get(model, owner)
    table = holder._parameters if leaf in holder._parameters else holder._buffers
    table[leaf] = source  # type: ignore[assignment]


def _get(model: nn.Module, name: str) -> torch.Tensor:
    prefix, _, leaf = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(prefix), leaf)
    return found


def check_unsaved_state(model: nn.Module, again: nn.Module) -> None:
    """Refuse a model whose tensors outside its state a rebuilt one does not have alike.

    Raises:
        BundleError: names the first such tensor.
    """
    saved = set(model.state_dict())
    for name, tensor in _all_tensors(model).items():
        if name in saved:
            continue
        other = _all_tensors(again).get(name)
        if other is None or other.shape != tensor.shape or not _equal(tensor.cpu(), other.cpu()):
            raise BundleError(
                f"the model holds the tensor {name!r} outside its state_dict, and a rebuilt one has another value "
                "there: register it as a persistent buffer, or use allow_pickle=True"
            )


def _all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{prefix}.{name}".lstrip(".")] = value
    return found


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal values, NaN equal to NaN; types may differ, as a model cast to another type rebuilds its own buffers."""
    if one.is_floating_point() and other.is_floating_point():
        return torch.allclose(one, other.to(one.dtype), rtol=0, atol=0, equal_nan=True)
    return torch.equal(one, other)
