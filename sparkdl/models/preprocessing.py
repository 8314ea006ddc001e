"""The features that a bundle's model was trained with.

Enters: what a bundle says of its preprocessing. Leaves: the fitted features, with the functions that cut texts imported
where the reader allows their packages; None for a model that takes its columns as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.documents.typed import Source
from sparkdl.features.fitted import Features
from sparkdl.models.folder import DOCUMENT, BundleInfo
from sparkdl.models.importing import resolve
from sparkdl.models.trust import allowed_imports, checked_packages

__all__ = ["features_of", "preprocessing_of"]

_KEY = "features"


def preprocessing_of(features: Features | None, **others: Any) -> dict[str, Any]:
    """What ``save_bundle`` is given as ``preprocessing`` for a model that was trained on features.

    Args:
        features: that made its inputs.
        others: JSON values that travel with them.
    """
    plain: Mapping[str, Any] = {} if features is None else {_KEY: features.to_json()}
    return {**others, **plain}


def features_of(info: BundleInfo, trusted: Sequence[str] = ()) -> Features | None:
    """The features that make the inputs of a bundle's model; None if it takes columns as they are.

    Args:
        info: of the bundle.
        trusted: packages that functions which cut texts may be imported from, besides those of ``allow_imports``.

    Raises:
        IntegrityError: it describes no features that could be.
        BundleError: a function is not allowed, or not installed here.
        ConfigError: ``trusted`` names what can never be allowed.
    """
    if _KEY not in info.preprocessing:
        return None
    allowed = (*checked_packages(trusted), *allowed_imports())
    source = Source(f"{info.uri}/{DOCUMENT}", "it was altered, or saved by another sparkdl: publish it again")
    function = functools.partial(resolve, allowed=allowed, needed_by="its text feature")
    return Features.from_json(info.preprocessing[_KEY], source, function)
