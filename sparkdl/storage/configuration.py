"""How the driver reaches its filesystems, as a value that travels to ranks and workers.

Enters: fsspec's configuration, and what the session's Hadoop configuration says of HDFS. Leaves: the same settings in
another process, for the time that it works for this driver. They may hold credentials: no ``repr`` shows them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sparkdl.storage.session import hadoop_settings

__all__ = ["Configuration"]


@dataclass(frozen=True)
class Configuration:
    """Settings of filesystems, by fsspec's name of the protocol."""

    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def here(cls) -> Configuration:
        """Those of this process."""
        module: Any = sys.modules.get("fsspec.config")  # nobody has set anything before it is imported
        known = {name: dict(options) for name, options in (module.conf if module else {}).items()}
        hdfs = hadoop_settings()
        if hdfs:
            known["hdfs"] = {**hdfs, **known.get("hdfs", {})}
        return cls(known)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let this process use them during the block, on top of its own."""
        if not self.settings:
            yield
            return
        from fsspec.config import conf

        before = {name: conf.get(name) for name in self.settings}
        conf.update({name: {**conf.get(name, {}), **options} for name, options in self.settings.items()})
        try:
            yield
        finally:
            for name, options in before.items():
                if options is None:
                    conf.pop(name, None)
                else:
                    conf[name] = options
