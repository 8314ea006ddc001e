"""torch.nn's own layers as JSON, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from sparkdl.documents.typed import Count, Source, convert
from sparkdl.errors import BundleError
from sparkdl.models.folder import Parametrization
from sparkdl.models.importing import make

Node = dict[str, Any]


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"class_": "class"}):
    """One module: a layer with arguments, a container with children, an encoder with its layer, or one seen before."""

    class_: str = ""
    arguments: dict[str, Any] = {}
    children: tuple[tuple[str, Any], ...] | None = None
    layer: dict[str, Any] | None = None
    num_layers: Count = 0
    norm: dict[str, Any] | None = None
    same_as: str | None = None


_CONTAINERS: tuple[type[nn.Module], ...] = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size")
_ELSEWHERE = {"device", "dtype"}  # the saved weights decide these
_LONGEST_LIST = 256
_SOURCE = Source("the structure of the bundle's model", "publish the model again")


def describe(module: nn.Module) -> Node:
    """Describe ``module`` as a tree of JSON values.

    The arguments are read from the attributes that the layers keep them in, so the tree holds no code, and whoever
    saves it rebuilds and compares before trusting it.

    Raises:
        BundleError: some part of it is not torch.nn's, or carries behaviour that its class does not have.
    """
    return _describe(module, "", {})


def _describe(module: nn.Module, path: str, seen: dict[int, str]) -> Node:
    if id(module) in seen:
        return {"same_as": seen[id(module)]}
    seen[id(module)] = path
    _refuse_extras(module, path)
    kind = parametrize.type_before_parametrizations(module)
    if kind in _CONTAINERS:
        children = [
            [name, _describe(child, f"{path}.{name}".lstrip("."), seen)]
            for name, child in module._modules.items()
            if child is not None  # an empty container is false
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
    unknown = [name for name in _registered(module) if _described(module, name, name) is None]
    if unknown:
        raise BundleError(
            f"the module {path or 'itself'!r} carries a parametrization of its {unknown[0]!r}, and only weight_norm "
            "and spectral_norm of torch.nn.utils.parametrizations can be described without code: register it in the "
            "constructor of a class of your own and give factory= and arguments=, or allow_pickle=True"
        )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    extras = [name for name in hooks if getattr(module, name, None)] + ["forward"] * ("forward" in vars(module))
    if any(type(hook).__module__.startswith("torch.nn.utils.") for hook in module._forward_pre_hooks.values()):
        raise BundleError(
            f"the module {path or 'itself'!r} carries the hook of a deprecated function of torch.nn.utils: take the "
            "weight_norm or spectral_norm of torch.nn.utils.parametrizations instead, or allow_pickle=True"
        )
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
    special = _SPECIAL.get(parametrize.type_before_parametrizations(module))
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
    return dict([*signature.items()][1:])  # without self, whatever its name is


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


def _pairwise_distance(module: Any) -> dict[str, Any]:
    return {"p": module.norm, "eps": module.eps, "keepdim": module.keepdim}


_SPECIAL: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    nn.MultiheadAttention: _attention,
    nn.PairwiseDistance: _pairwise_distance,
    nn.TransformerEncoderLayer: _encoder_layer,
}


def other_setting(model: nn.Module, again: nn.Module) -> str | None:
    """The first setting of a layer that a rebuilt model has otherwise, by its name in the model; None if all agree.

    A layer need not print all that it was made with, nor keep it by the name of its constructor's argument.
    """
    for (path, layer), rebuilt in zip(model.named_modules(), again.modules(), strict=True):
        for name, value in vars(rebuilt).items():
            if not name.startswith("_") and _comparable(vars(layer).get(name)) != _comparable(value):
                return f"{path}.{name}".lstrip(".")
    return None


def _comparable(value: Any) -> Any:
    """A setting, sequences as tuples; None of what is compared otherwise, or not at all."""
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    return value if isinstance(value, bool | int | float | str) or inspect.isroutine(value) else None


def parametrizations_of(model: nn.Module) -> tuple[Parametrization, ...]:
    """The parametrizations of the model's tensors that can be described; of others its constructor must know."""
    steps: list[Parametrization] = []
    for path, module in model.named_modules():
        for name in _registered(module):
            steps += _described(module, name, f"{path}.{name}".lstrip(".")) or ()
    return tuple(steps)


def _registered(module: Any) -> list[str]:
    return list(module.parametrizations) if parametrize.is_parametrized(module) else []


def _described(module: Any, name: str, tensor: str) -> list[Parametrization] | None:
    described = []
    for step in module.parametrizations[name]:
        if type(step) is parametrizations._WeightNorm:
            described.append(Parametrization(tensor=tensor, kind="weight_norm", dim=step.dim))
        elif type(step) is parametrizations._SpectralNorm:
            count = getattr(step, "n_power_iterations", 1)
            described.append(
                Parametrization(
                    tensor=tensor, kind="spectral_norm", dim=step.dim, eps=step.eps, n_power_iterations=count
                )
            )
        else:
            return None
    return described


def parametrize_again(model: nn.Module, wanted: Sequence[Parametrization]) -> nn.Module:
    """Register parametrizations of a rebuilt model's tensors, but for those that its constructor has registered.

    Raises:
        BundleError: it has no such tensor, or one of another shape.
    """
    registered = {
        f"{path}.{name}".lstrip(".") for path, module in model.named_modules() for name in _registered(module)
    }
    for step in wanted:
        if step.tensor in registered:
            continue
        holder, _, name = step.tensor.rpartition(".")
        try:
            module: Any = model.get_submodule(holder)
            if step.kind == "weight_norm":
                parametrizations.weight_norm(module, name, step.dim)
            else:
                parametrizations.spectral_norm(module, name, 1, step.eps, step.dim)
                module.parametrizations[name][-1].n_power_iterations = step.n_power_iterations
        except Exception as cause:  # whatever torch makes of a strange name or shape
            raise BundleError(
                f"the rebuilt model takes no {step.kind} of {step.tensor[:200]!r} ({cause}): save it again"
            ) from cause
    return model


def rebuild(tree: Any) -> nn.Module:
    """Build the module that ``describe`` described.

    Its tensors are shapes alone.

    Raises:
        BundleError: the tree names a class that torch.nn does not have, or arguments that it does not take.
    """
    return _build(tree, "", {})


def layer_class(name: str) -> type[nn.Module]:
    """The layer that ``torch.nn`` has under a name.

    Raises:
        BundleError: it has none.
    """
    kind = getattr(nn, name, None)
    lazy = isinstance(kind, type) and issubclass(kind, nn.modules.lazy.LazyModuleMixin)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or lazy or kind is nn.Module:
        raise BundleError(f"torch.nn {torch.__version__} has no layer {name!r}: load it with the torch that saved it")
    return kind


def _build(tree: Any, path: str, made: dict[str, nn.Module]) -> nn.Module:
    node = convert(tree, _Node, _SOURCE, f"${path and '.'}{path}")
    if node.same_as is not None:
        if node.same_as not in made:
            raise BundleError(f"the module {path!r} is said to be {node.same_as!r}, which is not before it")
        return made[node.same_as]
    kind = layer_class(node.class_)
    if node.children is None:
        arguments = checked_arguments(node.arguments)
        if node.class_ == "TransformerEncoder" and node.layer is not None:
            arguments["encoder_layer"] = _build(node.layer, f"{path}.layers.0", made)
            arguments["norm"] = None if node.norm is None else _build(node.norm, f"{path}.norm", made)
            arguments["num_layers"] = node.num_layers
        made[path] = make(kind, arguments, f"torch.nn.{node.class_}")
        return made[path]
    if kind not in _CONTAINERS:
        raise BundleError(f"torch.nn.{node.class_} at {path!r} is no container and has children: save it again")
    container = kind()
    for name, child in node.children:
        part = _build(child, f"{path}.{name}".lstrip("."), made)
        try:
            container.add_module(name, part)
        except KeyError as cause:
            raise BundleError(f"the module {path!r} cannot have a child {name!r}: save it again") from cause
    made[path] = container  # only now: no module holds itself
    return container


def checked_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one of torch's own layers, lists as tuples.

    Raises:
        BundleError: one decides where its tensors lie, or is larger than any that a layer takes.
    """
    checked = {}
    for name, value in arguments.items():
        if name in _ELSEWHERE:
            raise BundleError(f"the bundle's model gives a layer its {name}, which its reader decides: save it again")
        checked[name] = _checked(value, name)
    return checked


def _checked(value: Any, name: str) -> Any:
    if isinstance(value, int | float) and not abs(value) < 2**62:
        raise BundleError(f"the bundle's model gives a layer a {name} out of any range: save it again")
    if isinstance(value, list | dict) and len(value) > _LONGEST_LIST:
        raise BundleError(f"the bundle's model gives a layer {len(value)} values of {name}: save it again")
    return tuple(_checked(item, name) for item in value) if isinstance(value, list) else value
