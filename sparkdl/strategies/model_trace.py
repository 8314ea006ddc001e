"""The graph of a model by ``torch.fx``, traced as far as that cannot change what the model computes."""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx

from sparkdl.errors import ConfigError, first_line
from sparkdl.nn.modes import mode_of

InputStyle = Literal["positional", "keyword", "dict"]

_NUMBERS = {"shape", "ndim", "dtype", "device", "size", "dim"}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg}


@dataclass(frozen=True)
class ModelTrace:
    """The graph of a model.

    Attributes:
        graph: of the model's forward.
        inputs: names of the tensors that its placeholders stand for.
        body: the nodes that one stage each computes, in their order: all but inputs, what is read off them, and
            attributes, which every stage reads itself.
        modules: the module that each node was traced in.
        leaves: modules that stay whole because they cannot be traced, and why.
    """

    graph: torch.fx.Graph
    inputs: tuple[str, ...]
    body: list[torch.fx.Node]
    modules: dict[torch.fx.Node, str]
    leaves: dict[str, str]


class _Tracer(torch.fx.Tracer):
    """Traces as far into a model as that cannot change what it computes.

    A module stays whole if its forward cannot be traced, or if tracing would freeze or lose what it does: random
    numbers of its own, attributes that it sets, a ``no_grad`` or ``autocast`` block.
    """

    def __init__(self, inputs: Sequence[str], input_style: InputStyle) -> None:
        super().__init__()
        self.leaves: dict[str, str] = {}
        self.modules: dict[torch.fx.Node, str] = {}
        self._inputs, self._input_style = inputs, input_style
        self._path = [""]
        self._modes = _modes()

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Let the placeholders be the task's inputs, whatever ``forward`` is called with."""
        tensors = [self.create_proxy("placeholder", f"input_{i}", (), {}) for i in range(len(self._inputs))]
        named = dict(zip(self._inputs, tensors, strict=True))
        arguments: tuple[Any, ...] = (named,) if self._input_style == "dict" else tuple(tensors)
        keywords: dict[str, Any] = {}
        if self._input_style == "keyword":
            arguments, keywords = (), named
        model: Any = self.root
        try:
            inspect.signature(model.forward).bind(*arguments, **keywords)
        except TypeError as cause:
            raise ConfigError(
                f"{type(model).__name__}.forward{inspect.signature(model.forward)} cannot be called with the inputs "
                f"{list(self._inputs)} by input_style={self._input_style!r} ({cause}): give it what it takes"
            ) from cause

        def forward() -> Any:
            if _is_plain_encoder(model, keywords):
                return _encode(model, *arguments, **keywords)
            return model.forward(*arguments, **keywords)

        return (lambda: self._watched(model, forward)), []

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        if type(m) is torch.nn.TransformerEncoder:
            return module_qualified_name in self.leaves
        return module_qualified_name in self.leaves or super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return super().getattr(attr, attr_val, {})  # nodes of a forward that is given up are erased

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if _modes() != self._modes:
            raise torch.fx.proxy.TraceError("it switches gradients or autocast on or off, which a trace loses")
        node = super().create_node(*args, **kwargs)
        self.modules[node] = self._path[-1]
        return node

    def call_module(self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        self._path.append(name)
        nodes, stack = len(self.graph.nodes), self.module_stack.copy()
        try:
            if self.is_leaf_module(m, name):
                return super().call_module(m, forward, args, kwargs)
            body = forward
            if type(m) is torch.nn.TransformerEncoder:
                if not _is_plain_encoder(m, kwargs) or len(args) > 2:
                    raise torch.fx.proxy.TraceError("it is called with a padding mask")
                body = lambda *a, **k: _encode(m, *a, **k)  # noqa: E731
            traced = lambda *a, **k: self._watched(m, lambda: body(*a, **k))  # noqa: E731
            return super().call_module(m, traced, args, kwargs)
        except ConfigError:
            raise
        except Exception as error:
            if name in self.leaves or super().is_leaf_module(m, name):
                raise
            for node in reversed(list(self.graph.nodes)[nodes:]):
                self.graph.erase_node(node)
            self.module_stack = stack
            self.leaves[name] = first_line(error).rstrip(".:")
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._path.pop()

    def _watched(self, module: torch.nn.Module, forward: Callable[[], Any]) -> Any:
        """Call ``forward``; give up where it did what a trace cannot tell."""
        attributes = {part: dict(vars(part)) for part in module.modules()}
        generators = torch.get_rng_state(), random.getstate()
        try:
            result = forward()
        finally:
            changed = False
            for part, earlier in attributes.items():
                now = {name: value for name, value in vars(part).items() if not name.startswith("_tensor_constant")}
                if any(name not in earlier or earlier[name] is not value for name, value in now.items()):
                    changed = True
                    for name in now.keys() - earlier.keys():
                        del vars(part)[name]
                    vars(part).update(earlier)
            drawn = not torch.equal(generators[0], torch.get_rng_state()) or generators[1] != random.getstate()
            random.setstate(generators[1])
        if changed:
            raise torch.fx.proxy.TraceError("it sets attributes of its own")
        if drawn:
            raise torch.fx.proxy.TraceError("it draws random numbers that a trace would freeze")
        return result


def _modes() -> tuple[bool, ...]:
    kinds = ("cpu", "cuda")
    return (torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in kinds))


def _is_plain_encoder(module: torch.nn.Module, keywords: Mapping[str, Any]) -> bool:
    """Whether ``module`` is torch's encoder, called such that it runs its layers one after the other."""
    return type(module) is torch.nn.TransformerEncoder and keywords.get("src_key_padding_mask") is None


def _encode(encoder: torch.nn.TransformerEncoder, src: Any, mask: Any = None, *_: Any, **keywords: Any) -> Any:
    """The forward of ``encoder``, which cannot be traced, without its fast path."""
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, is_causal=bool(keywords.get("is_causal")))
    return src if encoder.norm is None else encoder.norm(src)


@contextmanager
def without_constants(model: torch.nn.Module) -> Iterator[None]:
    """Take off ``model`` the tensors that tracing puts there, which its forward made of nothing but numbers."""
    names_before = set(vars(model))
    try:
        yield
    finally:
        for name in set(vars(model)) - names_before:
            delattr(model, name)


def forked(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Leave torch's random numbers as they are."""
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    return torch.random.fork_rng(devices=list(devices))


def trace_model(
    model: torch.nn.Module, inputs: Sequence[str], input_style: InputStyle, *, training: bool
) -> ModelTrace:
    """Trace the forward of ``model``; within ``without_constants``.

    Args:
        model: whose modes and random numbers are left as they are.
        inputs: names of the tensors that it is called with.
        input_style: how it is called with them, as in ``Task``.
        training: trace what it computes while it trains; else while it evaluates.

    Raises:
        ConfigError: it cannot be traced, or is not called so.
    """
    tracer = _Tracer(inputs, input_style)
    with mode_of(model, training=training), forked(model):
        try:
            graph = tracer.trace(model)
        except ConfigError:
            raise
        except Exception as cause:
            raise ConfigError(
                f"{type(model).__name__} cannot be cut into stages, since its forward cannot be traced "
                f"({first_line(cause).rstrip('.:')}): move that into a submodule of its own, or give an nn.Sequential"
            ) from cause
    reads: dict[torch.fx.Node, str] = {}
    for node in graph.nodes:  # sources come before what is made of them
        reads[node] = _reads(node, {reads[source] for source in node.all_input_nodes})
    body = [node for node in graph.nodes if node.op not in ("get_attr", "output") and not reads[node]]
    return ModelTrace(graph, tuple(inputs), body, tracer.modules, tracer.leaves)


def _reads(node: torch.fx.Node, sources: set[str]) -> Literal["input", "number", ""]:
    """Whether ``node`` is an input of the model, or a number that its shape tells: each stage reads these itself.

    Args:
        node: of the graph.
        sources: what this function returned for the nodes that it is made of.
    """
    if node.op == "placeholder":
        return "input"
    if not sources or "" in sources:
        return ""
    if node.op == "call_method":
        return "number" if node.target in _NUMBERS else ""
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        return "number" if node.args[1] in _NUMBERS else ""
    if sources == {"number"} and (node.target is operator.getitem or node.target in _ARITHMETIC):
        return "number"
    return ""
