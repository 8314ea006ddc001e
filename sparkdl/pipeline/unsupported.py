"""What a pipeline file may say and no step does yet: refused, since a setting does something or is an error.

Enters: a sound file. Leaves: each such setting, for one ``PipelineFileError``. This is the only list; whoever builds
one of these removes its entry.
"""

from __future__ import annotations

from collections.abc import Callable

from sparkdl.pipeline.spec import PipelineSpec, Train

__all__ = ["unsupported"]

Path = tuple[str | int, ...]


def _differs(name: str) -> Callable[[PipelineSpec], bool]:
    default = getattr(Train(), name)
    return lambda spec: bool(getattr(spec.train, name) != default)


_NOT_BUILT: tuple[tuple[Path, Callable[[PipelineSpec], bool], str], ...] = (
    (
        ("publish", "label"),
        lambda spec: spec.publish.label is None and len(spec.label) > 1,
        " is missing, and there are several labels: name the one that metric and floors are of",
    ),
    *(
        (("train", name), _differs(name), " has no effect in a pipeline yet: leave it out")
        for name in ("partitions_per_process", "transform_batch_size")
    ),
)


def unsupported(spec: PipelineSpec) -> list[tuple[Path, str]]:
    """The path of each setting that nothing would act on, and the sentence that follows its name."""
    return [(path, sentence) for path, applies, sentence in _NOT_BUILT if applies(spec)]
