"""The numbers of ranks that hold a copy of the model, a part of it, or a stage: ``Mesh``, or its text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from sparkdl.errors import ConfigError

DIMENSIONS = ("pipeline", "data", "shard", "expert", "tensor")
"""The dimensions from the outermost to the innermost: ranks that are neighbours, on one host if they can be, share a
``tensor`` group, which exchanges most; stages of a pipeline, which exchange least, lie farthest apart."""
READERS = ("data", "shard", "expert")
"""The dimensions whose ranks read different rows."""
_SCHEDULES = ("1f1b", "gpipe", "naive")
_OPTIONS: dict[str, dict[str, Any]] = {
    "pipeline": {"micro_batches": None, "schedule": "1f1b", "cuts": None},
    "tensor": {"plan": None},
    "shard": {"keep_parameters": False, "offload": False},
}
"""The options that act on each dimension, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How a model and its data are spread over the ranks; their product is the number of ranks.

    One dimension may be None: it takes the ranks that the others leave.

    Attributes:
        data: copies of the model; each reads other rows, and gradients are averaged.
        shard: ranks among which parameters, gradients and optimizer state of one copy are cut; each reads other rows
            (Rajbhandari et al., SC 2020, stage 3; by torch's ``fully_shard``).
        tensor: ranks among which the matrices of one layer are cut, by columns and rows; they read the same rows
            (Shoeybi et al., 2019).
        pipeline: stages that the model is cut into, one after the other; they read the same rows (Huang et al., 2019;
            Narayanan et al., 2019).
        expert: ranks among which the experts of ``sparkdl.nn.MixtureOfExperts`` are dealt; each reads other rows
            (Lepikhin et al., 2021). With ``shard`` each expert is cut among the ranks of that dimension alone, and all
            else among both; a ``tensor`` group holds experts whole; of a ``pipeline`` each stage deals its own.
        keep_parameters: with ``shard``, parameters stay gathered from the forward to the backward pass, which is less
            to send and more to hold (stage 2); they are cut at rest.
        plan: with ``tensor``, by pattern of module names ``"column"``, ``"row"``, ``"heads"`` or ``"qkv"``, of linear
            layers, attentions and embeddings; None finds the plan in the model's structure.
        micro_batches: with ``pipeline``, parts that a batch goes through the stages in; None is four a stage.
        schedule: with ``pipeline``, ``"1f1b"``, ``"gpipe"`` or ``"naive"`` (one micro-batch).
        cuts: with ``pipeline``, names of the modules that begin the second stage and each after it; None balances
            measured time, and what is sent where times are equal; a run that goes on cuts as its checkpoint says. Each
            stage draws its own numbers for dropout, so other cuts, as two runs may measure them, draw others.
        activation_checkpointing: compute the activations of each block again in the backward pass instead of keeping
            them (Chen et al., 2016); blocks with running statistics keep theirs.
        offload: with ``shard`` on GPUs, parameters and optimizer state wait in the host's memory.

    Raises:
        ConfigError: a size is below 1, two are None, or an option has nothing to act on.
    """

    data: int | None = 1
    shard: int | None = 1
    tensor: int | None = 1
    pipeline: int | None = 1
    expert: int | None = 1
    keep_parameters: bool = False
    plan: Mapping[str, str] | None = None
    micro_batches: int | None = None
    schedule: str = "1f1b"
    cuts: tuple[str, ...] | None = None
    activation_checkpointing: bool = False
    offload: bool = False
    name: str = field(default="", compare=False)

    implementation: ClassVar[str] = "sparkdl.strategies.mesh_strategy:MeshStrategy"
    needs_torch_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for dimension in DIMENSIONS:
            size = getattr(self, dimension)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ConfigError(f"{dimension}={size!r} is no number of ranks: give 1 or more, or None for the rest")
        if sum(getattr(self, dimension) is None for dimension in DIMENSIONS) > 1:
            open_ones = [dimension for dimension in DIMENSIONS if getattr(self, dimension) is None]
            raise ConfigError(f"{' and '.join(open_ones)} are None, and the ranks that are left go to one: name a size")
        if self.cuts is not None:
            object.__setattr__(self, "cuts", tuple(self.cuts))
        if self.schedule not in _SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r} is unknown: choose one of {', '.join(_SCHEDULES)}")
        parts = self.micro_batches
        if parts is not None and (not isinstance(parts, int) or isinstance(parts, bool) or parts < 1):
            raise ConfigError(f"micro_batches={parts!r} is no number of parts of a batch: give 1 or more, or None")
        if self.schedule == "naive" and (self.micro_batches or 1) > 1:
            raise ConfigError(
                f"schedule='naive' sends a whole batch at once, and micro_batches={self.micro_batches}: drop one"
            )
        for dimension, options in _OPTIONS.items():
            options_set = [option for option, default in options.items() if getattr(self, option) != default]
            if options_set and getattr(self, dimension) == 1:
                raise ConfigError(
                    f"{options_set[0]}= has nothing to act on with {dimension}=1: drop it, or set {dimension}="
                )
        if self.activation_checkpointing and self.pipeline != 1:
            raise ConfigError(
                f"activation_checkpointing=True works on the blocks of a model, and pipeline={self.pipeline} cuts "
                "them: drop one"
            )

    def filled(self, ranks: int) -> Mesh:
        """Return the mesh with all sizes known, for a run of ``ranks``.

        Of a dimension that takes the ranks that are left, its options are at rest where that is one.

        Raises:
            ConfigError: the sizes do not fill the ranks.
        """
        product = math.prod(getattr(self, dimension) or 1 for dimension in DIMENSIONS)
        open_dimensions = [dimension for dimension in DIMENSIONS if getattr(self, dimension) is None]
        if ranks % product or (not open_dimensions and product != ranks):
            sizes = " x ".join(
                f"{dimension}={getattr(self, dimension)}"
                for dimension in DIMENSIONS
                if getattr(self, dimension) not in (1, None)
            )
            fitting = f"a multiple of {product}" if open_dimensions else f"{product}"
            raise ConfigError(f"{ranks} ranks do not fill the mesh {sizes or 'of one rank'}: run {fitting} of them")
        if not open_dimensions:
            return self
        options = _OPTIONS.get(open_dimensions[0], {}) if ranks == product else {}
        return replace(self, **{open_dimensions[0]: ranks // product}, **options)

    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of ``DIMENSIONS``; of a mesh that is filled."""
        return tuple(int(getattr(self, dimension)) for dimension in DIMENSIONS)

    @property
    def is_data_parallel(self) -> bool:
        """Whether it is nothing but copies of the model."""
        return not self.activation_checkpointing and all(
            getattr(self, dimension) == 1 for dimension in DIMENSIONS if dimension != "data"
        )

    @property
    def readers(self) -> int:
        """Number of parts that a global batch is dealt in; of a mesh that is filled."""
        return math.prod(int(getattr(self, dimension)) for dimension in READERS)

    @property
    def parts_of_a_batch(self) -> int:
        """Number of micro-batches; of a mesh that is filled."""
        if self.schedule == "naive":
            return 1
        return self.micro_batches or 4 * int(self.pipeline or 1)

    def place(self, number: int) -> Place:
        """The place of the rank of this number, counted host by host, in a mesh that is filled."""
        at: dict[str, int] = {}
        for dimension, size in zip(reversed(DIMENSIONS), reversed(self.sizes()), strict=True):
            number, at[dimension] = divmod(number, size)
        reader = 0
        for dimension in READERS:
            reader = reader * int(getattr(self, dimension)) + at[dimension]
        counts = at["tensor"] == 0 and at["pipeline"] == int(self.pipeline or 1) - 1
        return Place(**at, reader=reader, counts=counts)

    def __str__(self) -> str:
        """The text that it was read from, or one that gives it."""
        if self.name:
            return self.name
        values = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.name != "name"]
        defaults = [f"{field.name}={field.default!r}" for field in fields(self) if field.name != "name"]
        return f"mesh({', '.join(text for text, default in zip(values, defaults, strict=True) if text != default)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of one rank: its position in each dimension.

    Attributes:
        reader: which part of each global batch it reads.
        counts: whether it is the one, of those that read the same rows, whose outputs metrics see: of the last stage.
    """

    pipeline: int
    data: int
    shard: int
    expert: int
    tensor: int
    reader: int
    counts: bool


PRESETS = {
    "mesh": Mesh(),
    "zero2": Mesh(shard=None, keep_parameters=True, name="zero2"),
    "fsdp": Mesh(shard=None, name="fsdp"),
    "tensor": Mesh(tensor=None, name="tensor"),
    "pipeline": Mesh(pipeline=None, name="pipeline"),
    "expert": Mesh(expert=None, name="expert"),
}
"""The options by the name that ``strategy=`` takes."""
