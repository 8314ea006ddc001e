"""torch.nn's own layers as JSON, and back.

Enters: a module built from ``torch.nn``'s layers and containers. Leaves: a tree of class names and constructor
arguments; from such a tree, a fresh module. The arguments are read from the attributes that the layers keep them in,
so the tree holds no code, and whoever saves it rebuilds and compares before trusting it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sparkdl.errors import BundleError

__all__ = ["describe", "rebuild", "recovered_arguments"]

Node = dict[str, Any]

_CONTAINERS: tuple[type[nn.Module], ...] = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size")
_ELSEWHERE = {"device", "dtype"}  # the saved weights decide these


def describe(module: nn.Module) -> Node:
    """Describe ``module`` as a tree of JSON values.

    Raises:
        BundleError: some part of it is not torch.nn's, or carries behaviour that its class does not have.
    """
    return _describe(module, "", {})


def _describe(module: nn.Module, path: str, seen: dict[int, str]) -> Node:
    if id(module) in seen:
        return {"same_as": seen[id(module)]}
    seen[id(module)] = path
    _refuse_extras(module, path)
    kind = type(module)
    if kind in _CONTAINERS:
        children = [
            [name, _describe(child, f"{path}.{name}".lstrip("."), seen)]
            for name, child in module._modules.items()
            if child
        ]
        return {"class": kind.__name__, "children": children}
    if kind is nn.TransformerEncoder:
        return _describe_encoder(module, path, seen)
    if getattr(nn, kind.__name__, None) is not kind:
        raise BundleError(
            f"the module {path or 'itself'!r} is a {kind.__module__}.{kind.__qualname__}, only torch.nn's own layers "
            "can be described without code: give factory= and arguments=, or allow_pickle=True"
        )
    return {"class": kind.__name__, "arguments": recovered_arguments(module, path)}


def _refuse_extras(module: nn.Module, path: str) -> None:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    extras = [name for name in hooks if getattr(module, name, None)] + ["forward"] * ("forward" in vars(module))
    if extras:
        raise BundleError(
            f"the module {path or 'itself'!r} carries {extras}, which its class does not: put that into a class "
            "of your own and give factory= and arguments=, or allow_pickle=True"
        )


def _describe_encoder(module: nn.Module, path: str, seen: dict[int, str]) -> Node:
    layers, norm = list(module.layers), module.norm  # type: ignore[arg-type]
    return {
        "class": "TransformerEncoder",
        "layer": _describe(layers[0], f"{path}.layers.0", seen),
        "num_layers": len(layers),
        "norm": _describe(norm, f"{path}.norm", seen) if isinstance(norm, nn.Module) else None,
        "arguments": {"enable_nested_tensor": module.enable_nested_tensor, "mask_check": module.mask_check},
    }


def recovered_arguments(module: nn.Module, path: str = "") -> dict[str, Any]:
    """The constructor's arguments, read from attributes of the same names.

    Raises:
        BundleError: an argument without a default left no attribute, or one that JSON cannot hold.
    """
    special = _SPECIAL.get(type(module))
    if special is not None:
        return special(module)
    arguments: dict[str, Any] = {}
    for name, parameter in _parameters(module).items():
        if name in _ELSEWHERE or name.startswith("_"):
            continue
        if not hasattr(module, name):
            if parameter.default is inspect.Parameter.empty:
                raise BundleError(
                    f"{type(module).__qualname__} at {path or 'the root'!r} keeps no attribute for its argument "
                    f"{name!r}: give factory= and arguments=, or allow_pickle=True"
                )
            continue
        value = getattr(module, name)
        if name == "bias" and not isinstance(value, bool):
            value = value is not None
        arguments[name] = _plain(value, f"{type(module).__qualname__}.{name}")
    return arguments


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    if isinstance(module, nn.RNNBase):  # its constructor takes *args
        names: tuple[str, ...] = (*_RECURRENT, "nonlinearity") if isinstance(module, nn.RNN) else _RECURRENT
        if isinstance(module, nn.GRU | nn.RNN):
            names = tuple(name for name in names if name != "proj_size")
        return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names}
    if (
        type(module).__init__ is nn.Module.__init__ or type(module) is nn.Identity
    ):  # takes no arguments, or ignores them
        return {}
    signature = inspect.signature(type(module).__init__).parameters
    kinds = {name: parameter.kind for name, parameter in signature.items()}
    starred = [name for name, kind in kinds.items() if kind in (2, 4)]
    if starred:
        raise BundleError(
            f"{type(module).__qualname__} takes {starred}, whose values leave no attribute: "
            "give factory= and arguments=, or allow_pickle=True"
        )
    return {name: parameter for name, parameter in signature.items() if name != "self"}


def _plain(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item, what) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, what) for key, item in value.items()}
    raise BundleError(
        f"{what} is a {type(value).__name__}, which JSON cannot hold: "
        "give factory= and arguments=, or allow_pickle=True"
    )


def _attention(module: Any) -> dict[str, Any]:
    names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
    return {
        **{name: getattr(module, name) for name in names},
        "bias": module.in_proj_bias is not None,
        "add_bias_kv": module.bias_k is not None,
    }


def _encoder_layer(module: Any) -> dict[str, Any]:
    activations: dict[Any, str] = {nn.functional.relu: "relu", nn.functional.gelu: "gelu"}
    activation = activations.get(module.activation)
    if activation is None:
        raise BundleError(
            f"TransformerEncoderLayer has the activation {module.activation!r}, only 'relu' and 'gelu' can be "
            "described: give factory= and arguments=, or allow_pickle=True"
        )
    attention = module.self_attn
    return {
        "d_model": attention.embed_dim,
        "nhead": attention.num_heads,
        "dim_feedforward": module.linear1.out_features,
        "dropout": module.dropout.p,
        "activation": activation,
        "layer_norm_eps": module.norm1.eps,
        "batch_first": attention.batch_first,
        "norm_first": module.norm_first,
        "bias": module.linear1.bias is not None,
    }


_SPECIAL: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_layer,
}


def rebuild(node: Node) -> nn.Module:
    """Build the module that ``describe`` described, with fresh weights.

    Raises:
        BundleError: the tree names a class that torch.nn does not have, or arguments that it does not take.
    """
    return _rebuild(node, "", {})


def _rebuild(node: Node, path: str, made: dict[str, nn.Module]) -> nn.Module:
    if "same_as" in node:
        return made[node["same_as"]]
    kind = getattr(nn, node["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise BundleError(
            f"torch.nn {torch.__version__} has no layer {node['class']!r}: load it with the torch that saved it"
        )
    if "children" in node:
        module = kind()
        made[path] = module
        for name, child in node["children"]:
            module.add_module(name, _rebuild(child, f"{path}.{name}".lstrip("."), made))
        return module
    arguments = {name: _tuples(value) for name, value in node["arguments"].items()}
    try:
        if "layer" in node:
            norm = _rebuild(node["norm"], f"{path}.norm", made) if node["norm"] else None
            layer = _rebuild(node["layer"], f"{path}.layers.0", made)
            module = nn.TransformerEncoder(layer, node["num_layers"], norm, **arguments)  # type: ignore[arg-type]
        else:
            module = kind(**arguments)
    except (TypeError, ValueError) as cause:
        raise BundleError(
            f"torch.nn.{node['class']} refuses the arguments {arguments}: {cause}; check torch's version"
        ) from cause
    made[path] = module
    return module


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
