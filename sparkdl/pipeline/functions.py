"""Which functions a pipeline file names, and where.

Enters: a valid file. Leaves: ``module:function`` of each, with the path of the key that it stands under.
"""

from __future__ import annotations

from collections.abc import Iterator

from sparkdl.features.fitted import token_functions
from sparkdl.pipeline.spec import PipelineSpec, Range

__all__ = ["named_functions"]

Path = tuple[str | int, ...]


def named_functions(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    """Yield the path and the name of every function that the file names."""
    function = getattr(spec.source, "function", None)
    if function is not None:
        yield ("source", "function"), function
    if spec.transform is not None and spec.transform.function is not None:
        yield ("transform", "function"), spec.transform.function
    for name, options in spec.features.items():
        for target in token_functions({name: options}):
            yield ("features", name), target
    for name, label in spec.label.items():
        if label.loss is not None and ":" in label.loss:
            yield ("label", name, "loss"), label.loss
    if spec.model.factory is not None:
        yield ("model", "factory"), spec.model.factory
    if ":" in spec.train.optimizer:
        yield ("train", "optimizer"), spec.train.optimizer
    searched = spec.search.space.get("train.optimizer", ()) if spec.search is not None else ()
    for position, optimizer in enumerate(() if isinstance(searched, Range) else searched):
        if isinstance(optimizer, str) and ":" in optimizer:
            yield ("search", "space", "train.optimizer", position), optimizer
