"""The values of ``strategy=``: a name, or a name with options, as in ``"mesh(data=2, tensor=2)"``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from sparkdl.config import name_and_options
from sparkdl.errors import ConfigError
from sparkdl.strategies import STRATEGIES, local_steps, mesh, server_options
from sparkdl.strategies.local_steps import LocalSteps
from sparkdl.strategies.mesh import Mesh
from sparkdl.strategies.server_options import ServerOptions

AUTO = "auto"
"""The ranks of a fit measure model and links, and take what ``planner.py`` puts first."""
Choice = Mesh | LocalSteps | ServerOptions
PRESETS: Mapping[str, Choice] = {**mesh.PRESETS, **local_steps.PRESETS, **server_options.PRESETS}
"""The options that a name of ``strategy=`` stands for, by that name; each has the path of its class."""


def choice_of(text: str) -> Choice:
    """Read ``"fsdp"``, ``"pipeline(micro_batches=8)"``, ``"mesh(data=2, tensor=2)"`` or ``"diloco(every=50)"``.

    Raises:
        ConfigError: it is none of these, or an option cannot be.
    """
    unknown = ConfigError(
        f"strategy={text!r} is unknown: choose one of {sorted({*STRATEGIES, *PRESETS, AUTO})}, with options as in "
        "'mesh(data=2, tensor=2)'"
    )
    try:
        name, options = name_and_options(text)
    except ValueError:
        raise unknown from None
    if name not in PRESETS:
        raise unknown
    preset = PRESETS[name]
    names = {option.name for option in fields(preset)} - {"name"}
    misspelt = sorted(options.keys() - names)
    if misspelt:
        raise ConfigError(
            f"strategy={text!r}: {misspelt[0]!r} is no option of {name}: choose of {', '.join(sorted(names))}"
        )
    return replace(preset, **options, name=text.strip())


def needs_torch_groups(strategy: str) -> bool:
    """Whether the ranks of a strategy, by its text, exchange by groups of torch.distributed, which Horovod lacks."""
    if strategy == AUTO or strategy in STRATEGIES:
        return strategy != "all_reduce"
    return choice_of(strategy).needs_torch_groups
