"""The settings by which the driver reaches its filesystems, as a value that travels to ranks and workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sparkdl.storage.session import (
    LOCAL,
    configured_on_disk,
    default_filesystem_lent,
    default_filesystem_of,
    hadoop_client_settings_of,
    hadoop_settings,
    is_here,
    s3a_settings,
    s3a_settings_lent,
    s3a_settings_of,
)


@dataclass(frozen=True)
class Configuration:
    """Settings of filesystems.

    They may hold credentials: no ``repr`` shows them.

    Attributes:
        settings: fsspec's, by its name of the protocol.
        s3a: Spark's for S3, see ``s3a_settings``.
        default_filesystem: what plain paths belong to until there is a session; None leaves that as it is.
    """

    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    s3a: Mapping[str, str] = field(default_factory=dict, repr=False)
    default_filesystem: str | None = None

    @classmethod
    def here(cls) -> Configuration:
        """The settings of this process."""
        module: Any = sys.modules.get("fsspec.config")  # nobody has set anything before it is imported
        fsspec_options = {name: dict(options) for name, options in (module.conf if module else {}).items()}
        hdfs = hadoop_settings()
        if hdfs:
            fsspec_options["hdfs"] = {**hdfs, **fsspec_options.get("hdfs", {})}
        return cls(fsspec_options, s3a_settings())

    @classmethod
    def to_come(cls, settings: Mapping[str, str]) -> Configuration:
        """What a session with these settings will say of S3, HDFS and plain paths, for the time until it is there."""
        merged = {**configured_on_disk(), **settings}
        hdfs = hadoop_client_settings_of(merged)
        default = default_filesystem_of(merged)
        s3a = {**s3a_settings(), **s3a_settings_of({name: text for name, text in settings.items() if "${" not in text})}
        return cls({"hdfs": hdfs} if hdfs and default != LOCAL else {}, s3a, default)

    @classmethod
    def of_server(cls, address: str) -> Configuration:
        """The settings of a Spark Connect server (``sc://host:port``); a local one tells of plain paths, too."""
        host = urlsplit(address).hostname or ""
        default = default_filesystem_of(configured_on_disk()) if is_here(host) else f"file://{host}"
        return cls(s3a=s3a_settings(), default_filesystem=default)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let this process use them during the block, on top of its own."""
        with s3a_settings_lent(self.s3a), default_filesystem_lent(self.default_filesystem), self._fsspec():
            yield

    @contextmanager
    def _fsspec(self) -> Iterator[None]:
        if not self.settings:
            yield
            return
        from fsspec.config import conf

        previous = {name: conf.get(name) for name in self.settings}
        conf.update({name: {**conf.get(name, {}), **options} for name, options in self.settings.items()})
        try:
            yield
        finally:
            for name, options in previous.items():
                if options is None:
                    conf.pop(name, None)
                else:
                    conf[name] = options
