"""A pipeline as its file defines it: what it says, where things lie, and which code it names; no run changes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparkdl.models.trust import never
from sparkdl.pipeline.code import code_hash, named_functions, saved_functions, split_target
from sparkdl.pipeline.file import PipelineFile
from sparkdl.pipeline.sources import Source, source_of
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.storage import Storage
from sparkdl.tables.table import Table


@dataclass(frozen=True)
class Project:
    """What a file defines.

    Attributes:
        file: read and valid.
    """

    file: PipelineFile

    @property
    def spec(self) -> PipelineSpec:
        """What the file says."""
        return self.file.spec

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The same as JSON values, for keys."""
        return self.file.deciding()

    @cached_property
    def runs(self) -> Storage:
        """The folder of records, results of steps, leases and models in the making."""
        return Storage.of(str(self.spec.places.runs))

    def table(self, name: str) -> Table:
        """One of the pipeline's own tables: ``clean``, ``quarantine``, ``receipts``, ``predictions``, ``runs``."""
        return Table(f"{self.spec.places.tables}/{name}", engine="delta-rs")  # nobody else writes them

    @property
    def predictions(self) -> Table:
        """The table that the champion's predictions go to, which may be anybody's."""
        return Table(str(self.spec.score.target))

    @cached_property
    def source(self) -> Source:
        """Where the rows come from."""
        return source_of(self.spec.source)

    @cached_property
    def code(self) -> dict[str, str]:
        """A hash of the code behind every function that the file names."""
        return {target: code_hash(target) for _, target in named_functions(self.spec)}

    @property
    def trusted(self) -> list[str]:
        """The packages of the functions that a model of this file names: whoever runs the file trusts them."""
        modules = [split_target(target)[0] for _, target in saved_functions(self.spec)]
        packages = {module: module.split(".")[0] for module in modules}
        return sorted({module if never(package) else package for module, package in packages.items()})
