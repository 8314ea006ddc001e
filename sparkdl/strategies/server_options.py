"""The options of parameter servers, and how far ahead of each other workers may run: ``ServerOptions``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from sparkdl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Servers hold the parameters and step them; every rank is a worker, which pushes gradients and pulls parameters.

    A worker's clock counts its pushes. With ``staleness=0`` a step is made of the mean of all workers' gradients, and
    trains what ``all_reduce`` trains. With more, and with None, each push is a step of its own.

    Attributes:
        servers: how many; the first ranks host one each.
        staleness: how many clocks a worker may be ahead of the slowest one (Ho et al., NeurIPS 2013); None sets no
            bound (Dean et al., NeurIPS 2012, section 4.1).
        tolerant: whether the others go on without a rank that is gone. The launchers of sparkdl end a run that lost a
            rank, and its next attempt goes on from the last checkpoint: that is exact, and what ranks do that went on
            meanwhile is not.

    Raises:
        ConfigError: an option cannot be.
    """

    servers: int = 1
    staleness: int | None = 0
    tolerant: bool = False
    name: str = field(default="", compare=False)

    implementation: ClassVar[str] = "sparkdl.strategies.parameter_server:ParameterServer"
    needs_torch_groups: ClassVar[bool] = False
    is_data_parallel: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.servers, int) or isinstance(self.servers, bool) or self.servers < 1:
            raise ConfigError(f"servers={self.servers!r} is no number of servers: give 1 or more")
        clocks = self.staleness
        if clocks is not None and (not isinstance(clocks, int) or isinstance(clocks, bool) or clocks < 0):
            raise ConfigError(
                f"staleness={clocks!r} is no number of clocks between the fastest worker and the slowest: give 0 or "
                "more, or None for no bound"
            )
        if not isinstance(self.tolerant, bool):
            raise ConfigError(f"tolerant={self.tolerant!r} is neither True nor False: give one of them")

    def filled(self, ranks: int) -> ServerOptions:
        """Return the same, for ``ranks`` ranks.

        Raises:
            ConfigError: they are fewer than the servers.
        """
        if self.servers > ranks:
            raise ConfigError(
                f"strategy='{self}' has servers={self.servers}, of which each is on a rank of its own, and there are "
                f"{ranks} ranks: lower servers, or start more ranks"
            )
        return self

    def __str__(self) -> str:
        """The text that it was read from, or one that gives it."""
        if self.name:
            return self.name
        options = (f"{option.name}={getattr(self, option.name)!r}" for option in fields(self) if option.name != "name")
        return f"parameter_server({', '.join(options)})"


PRESETS = {"parameter_server": ServerOptions(name="parameter_server")}
"""The options by the name that ``strategy=`` takes."""
