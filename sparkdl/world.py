"""The topology of a run as a plain value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sparkdl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Which rank this process is, among how many, where.

    Attributes:
        rank: position among all ranks, ``0 <= rank < size``.
        size: number of ranks of the run.
        local_rank: position among the ranks of this host.
        local_size: number of ranks on this host.
        node_rank: position of this host among the hosts of the run.
        num_nodes: number of hosts.
        device: torch's name of the device this rank computes on (``"cpu"``, ``"cuda:0"``).
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, position, count in (
            ("rank", self.rank, self.size),
            ("local_rank", self.local_rank, self.local_size),
            ("node_rank", self.node_rank, self.num_nodes),
        ):
            if not 0 <= position < count:
                raise ConfigError(f"{name}={position} does not lie in 0..{count - 1}: number ranks from 0")

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, the one that writes checkpoints and reports."""
        return self.rank == 0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> World:
        """Read the variables that torchrun and sparkdl's own launchers set, or else those of Horovod's.

        A bare process is a world of one.
        """
        env = os.environ if env is None else env
        if "RANK" not in env and "HOROVOD_RANK" in env:
            return cls(
                rank=int(env["HOROVOD_RANK"]),
                size=int(env["HOROVOD_SIZE"]),
                local_rank=int(env["HOROVOD_LOCAL_RANK"]),
                local_size=int(env["HOROVOD_LOCAL_SIZE"]),
                node_rank=int(env["HOROVOD_CROSS_RANK"]),
                num_nodes=int(env["HOROVOD_CROSS_SIZE"]),
                device=env.get("SPARKDL_DEVICE", "cpu"),
            )
        return cls(
            rank=int(env.get("RANK", "0")),
            size=int(env.get("WORLD_SIZE", "1")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_size=int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", "1"))),
            node_rank=int(env.get("GROUP_RANK", "0")),
            num_nodes=int(env.get("GROUP_WORLD_SIZE", "1")),
            device=env.get("SPARKDL_DEVICE", "cpu"),
        )


SOLO = World()
"""The world of one process on one host."""
