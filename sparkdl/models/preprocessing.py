"""The features that a bundle's model was trained with, and the types of the columns that it reads."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.documents.typed import Source, convert
from sparkdl.features.fitted import Features
from sparkdl.models.folder import DOCUMENT, BundleInfo
from sparkdl.models.importing import resolve
from sparkdl.models.trust import allowed_imports, checked_packages

__all__ = ["COLUMN_TYPES", "column_types", "features_of", "preprocessing_of"]

COLUMN_TYPES = "column_types"
"""The key under which a bundle's preprocessing holds the types of the columns that were read in training."""
_KEY = "features"
_REMEDY = "it was altered, or saved by another sparkdl: publish it again"


def preprocessing_of(
    features: Features | None, types: Mapping[str, str] | None = None, /, **others: Any
) -> dict[str, Any]:
    """What ``save_bundle`` is given as ``preprocessing`` of a model.

    Args:
        features: that made its inputs; None if it takes columns as they are.
        types: by column, Spark's name of its type; of those that the features do not read nothing is kept.
        others: JSON values that travel with them.
    """
    types_by_column = {
        name: kind for name, kind in (types or {}).items() if features is None or name in features.columns
    }
    plain: Mapping[str, Any] = {} if features is None else {_KEY: features.to_json()}
    return {**({COLUMN_TYPES: types_by_column} if types_by_column else {}), **others, **plain}


def features_of(info: BundleInfo, trusted: Sequence[str] = (), *, functions: bool = True) -> Features | None:
    """The features that make the inputs of a bundle's model; None if it takes columns as they are.

    Args:
        info: of the bundle.
        trusted: packages that functions which cut texts may be imported from, besides those of ``allow_imports``.
        functions: whether these are imported; without, the features can be looked at, and not applied.

    Raises:
        IntegrityError: it describes no features that could be.
        BundleError: a function is not allowed, or not installed here.
        ConfigError: ``trusted`` names what can never be allowed.
    """
    if _KEY not in info.preprocessing:
        return None
    allowed = (*checked_packages(trusted), *allowed_imports())
    source = Source(f"{info.uri}/{DOCUMENT}", _REMEDY)
    function = functools.partial(resolve, allowed=allowed, needed_by="its text feature")
    return Features.from_json(info.preprocessing[_KEY], source, function if functions else None)


def column_types(info: BundleInfo) -> dict[str, str]:
    """Spark's names of the types that columns had in training, such as ``bigint``; those that are known.

    Raises:
        IntegrityError: it holds something else.
    """
    source = Source(f"{info.uri}/{DOCUMENT}", _REMEDY)
    return convert(info.preprocessing.get(COLUMN_TYPES, {}), dict[str, str], source, f"$.preprocessing.{COLUMN_TYPES}")
