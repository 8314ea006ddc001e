"""Spark ``Param`` objects made from the table, with the getters and setters that Horovod's and Spark's users write.

Enters: keyword arguments and param maps. Leaves: a ``Params`` whose every value was checked by its converter. None
means the default, an unknown name or two names for one thing raise, and nothing is accepted and ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params

from sparkdl.errors import ConfigError
from sparkdl.estimator.params.renamed import advice
from sparkdl.estimator.params.spec import ALIASES, ParamSpec

__all__ = ["CheckedParams", "check_conflicts", "declare", "set_defaults", "value_of"]

_T = TypeVar("_T", bound="type[CheckedParams]")


class CheckedParams(Params):
    """Params that refuse unknown names, and read None as "the default"."""

    SPECS: tuple[ParamSpec, ...] = ()
    __signature__: inspect.Signature

    def setParams(self: Any, **params: Any) -> Any:
        """Set several parameters by name; None puts one back to its default.

        Raises:
            ConfigError: an unknown name, a value that its parameter does not take, or two names for one thing.
        """
        self._set(**params)
        check_conflicts(self)
        return self

    def copy(self: Any, extra: Any = None) -> Any:
        """Return a copy with the values of a param map.

        Raises:
            ConfigError: a key is no ``Param``, or a value is not what its parameter takes.
        """
        for key in extra or ():
            if not isinstance(key, Param):
                raise ConfigError(
                    f"the param map holds the key {key!r}, a {type(key).__name__}: give the Param, as in "
                    "{estimator.epochs: 3}"
                )
        return super().copy(extra)

    def set(self, param: Param[Any], value: Any) -> None:
        """Set one parameter of this instance.

        Raises:
            ConfigError: the parameter does not take the value.
        """
        self._shouldOwn(param)
        self._set(**{param.name: value})

    def _set(self: Any, **params: Any) -> Any:
        known = [spec.name for spec in self.SPECS]
        for name, value in params.items():
            if name not in known:
                raise ConfigError(f"{type(self).__name__} has no parameter {name!r}: {advice(name, known)}")
            if value is None:
                self._paramMap.pop(self.getParam(name), None)
            else:
                super()._set(**{name: value})
        return self


def check_conflicts(params: CheckedParams) -> None:
    """Refuse two names for one thing, and parameters that exclude one another.

    Raises:
        ConfigError: names both and says which to drop.
    """
    known = {spec.name for spec in params.SPECS}
    for ours, alias in ALIASES.items():
        if {ours, alias} <= known and params.isSet(ours) and params.isSet(alias):
            raise ConfigError(
                f"{ours}={params.getOrDefault(ours)!r} and {alias}={params.getOrDefault(alias)!r} name the same thing: "
                f"give one of the two"
            )
    if {"loss", "loss_constructors"} <= known and params.isSet("loss") and params.isSet("loss_constructors"):
        raise ConfigError("loss and loss_constructors are both given: drop one of the two")
    if {"outputCols", "predictionCol"} <= known and params.isSet("outputCols") and params.isSet("predictionCol"):
        given = params.getOrDefault("outputCols"), params.getOrDefault("predictionCol")
        raise ConfigError(
            f"outputCols={given[0]} and predictionCol={given[1]!r} both name the output: give one of the two"
        )


def value_of(params: CheckedParams, name: str) -> Any:
    """The value of ``name``, through Spark's name for it where only that one is set (a single column as a list)."""
    alias = ALIASES.get(name)
    if alias is None or params.isSet(name):
        return params.getOrDefault(name)
    value = params.getOrDefault(alias)
    return [value] if name in ("feature_cols", "label_cols") else value


def declare(specs: Iterable[ParamSpec]) -> Callable[[_T], _T]:
    """Class decorator: give a ``CheckedParams`` one ``Param``, one getter and one setter a spec, and a signature."""

    def decorate(cls: _T) -> _T:
        cls.SPECS = tuple(specs)
        for spec in cls.SPECS:
            doc = f"{spec.effect} ({spec.unit}; from {spec.peer})"
            setattr(cls, spec.name, Param(Params._dummy(), spec.name, doc, _converter(spec)))
            for accessor in (_getter(spec), _setter(spec)):
                if accessor.__name__ not in cls.__dict__:
                    setattr(cls, accessor.__name__, accessor)
        keyword = inspect.Parameter.KEYWORD_ONLY
        given = [inspect.Parameter(spec.name, keyword, default=spec.default) for spec in cls.SPECS]
        cls.__signature__ = inspect.Signature(given)
        return cls

    return decorate


def set_defaults(params: CheckedParams) -> None:
    """Give every parameter its default of the table."""
    params._setDefault(**{spec.name: spec.default for spec in params.SPECS})


def _converter(spec: ParamSpec) -> Callable[[Any], Any]:
    # Bound by default arguments: Spark copies Param objects, and the copy keeps this function.
    def convert(value: Any, name: str = spec.name, checked: Any = spec.converter) -> Any:
        return checked(name, value)

    return convert


def _getter(spec: ParamSpec) -> Callable[..., Any]:
    def get(self: CheckedParams, name: str = spec.name) -> Any:
        return value_of(self, name)

    get.__name__ = get.__qualname__ = f"get{spec.suffix}"
    get.__doc__ = f"Return {spec.name}: {spec.effect}"
    return get


def _setter(spec: ParamSpec) -> Callable[..., Any]:
    def set_value(self: CheckedParams, value: Any, name: str = spec.name) -> Any:
        return self._set(**{name: value})

    set_value.__name__ = set_value.__qualname__ = f"set{spec.suffix}"
    set_value.__doc__ = f"Set {spec.name}: {spec.effect}"
    return set_value
