"""Whether what receipts name is still there: tables, shard sets, bundles, versions of the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sparkdl.errors import BundleError
from sparkdl.models.folder import read_bundle
from sparkdl.storage import Storage
from sparkdl.storage.address import looks_like_a_table
from sparkdl.tables.engine import spark_session
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from sparkdl.models.registry import ModelRegistry
    from sparkdl.pipeline.state.results import Shards

__all__ = ["Places"]


class Places:
    """Looks once for each place that is there: a run that holds the lease is the only one who takes any away."""

    def __init__(self) -> None:
        self._there: set[str] = set()

    def table(self, uri: str) -> bool:
        """Whether there is a table. A catalog is asked only where a session is; without one its receipt is believed."""
        if looks_like_a_table(uri) and spark_session() is None:
            return True
        return self._look(uri, lambda: Table(uri).exists())

    def file(self, uri: str) -> bool:
        """Whether a file or folder is there."""
        return self._look(uri, lambda: Storage.of(uri).exists())

    def shards(self, shards: Shards) -> bool:
        """Whether both sets still lie where the step left them."""
        return all(self.file(Storage.of(uri).child("manifest.json").uri) for uri in (shards.train, shards.validate))

    def bundle(self, uri: str) -> bool:
        """Whether a whole bundle lies there."""

        def whole() -> bool:
            try:
                read_bundle(uri)
            except (BundleError, OSError):
                return False
            return True

        return self._look(uri, whole)

    def published(self, registry: ModelRegistry, name: str) -> bool:
        """Whether the registry still knows the model; single versions may have been deleted."""
        return self._look(f"{registry.uri} {name}", lambda: bool(registry.list(name)))

    def _look(self, address: str, exists: Callable[[], bool]) -> bool:
        if address not in self._there and exists():
            self._there.add(address)
        return address in self._there
