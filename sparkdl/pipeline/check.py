"""A pipeline file against its source's columns, and against all else that can be told before a run."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.errors import IntegrityError, SchemaError, SparkdlError, StorageError
from sparkdl.pipeline.analysis import analysed
from sparkdl.pipeline.file import PipelineFile
from sparkdl.pipeline.file.columns import misfits, read_of_source
from sparkdl.pipeline.file.conditions import sql_problem
from sparkdl.pipeline.file.problems import Path
from sparkdl.pipeline.sources.base import Columns, SourceSnapshot
from sparkdl.pipeline.sources.table_formats import TableFilesError
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.project import Project
from sparkdl.storage import Storage, check_places
from sparkdl.storage.address import looks_like_a_table

_REFUSED = (SchemaError, IntegrityError, TableFilesError)
"""What is wrong with a source itself; whatever else goes wrong, a file is often checked where the rows are not."""


def check_source(project: Project, snapshot: SourceSnapshot) -> None:
    """Hold the file against the columns of its source, as far as these are known without Spark.

    Raises:
        PipelineFileError: columns are missing, or have types that their use does not fit.
        SchemaError: Spark cannot read them, or the source has no such partitions.
        IntegrityError: the log of a Delta table names a file outside of its folder.
        TableFilesError: the files are those of a Delta, Iceberg or Hudi table.
    """
    try:
        columns = project.source.columns(snapshot)
    except _REFUSED:
        raise
    except SparkdlError:
        return
    if columns.complete and not columns.why_not:
        project.file.check_columns(columns.types)


def problems_of(project: Project) -> tuple[list[tuple[Path, str]], str]:
    """Everything that would end a run of this file, as far as that can be told before one, and what cannot be told.

    Columns, the transform's SQL, a label that has one value, and places that cannot be written.
    """
    spec, problems, unknown = project.spec, list(_unwritable(project.file)), []
    try:
        snapshot = project.source.snapshot()
        columns = project.source.columns(snapshot)
    except _REFUSED as error:
        return [*problems, (("source",), f": {error}")], ""
    except SparkdlError as error:
        columns = Columns(types={}, why_not=str(error))
    if columns.why_not:
        unknown.append(f"the columns of the source were not looked at: {columns.why_not}")
    elif not columns.complete:
        absent = [repr(column) for column in read_of_source(spec) if column not in columns.types]
        if absent:
            unknown.append(f"the first rows of the source do not have {', '.join(absent)}: check the spelling")
    if columns.complete and not columns.why_not:
        analysis = analysed(spec, columns.types)
        missing = list(misfits(spec, columns.types, analysis.transformed))
        paths = {path[:2] for path, _ in missing}
        problems += [(path, sentence) for path, sentence in analysis.problems if path[:2] not in paths]
        problems += missing
        problems += [problem for problem in _constant_labels(project, snapshot) if problem[0] not in paths]
        unknown += [analysis.unknown] if analysis.unknown else []
    elif spec.transform is not None and spec.transform.sql is not None:
        sentence = sql_problem(spec.transform.sql)
        problems += [(("transform", "sql"), sentence)] if sentence else []
        unknown.append("transform.sql was read and not analysed, since not all columns are known")
    return problems, "; ".join(unknown)


def places_written(spec: PipelineSpec) -> dict[str, Storage]:
    """The places that a run writes to, by their keys in the file."""
    names, target = ("runs", "tables", "shards", "registry"), str(spec.score.target)
    places = {f"places.{name}": Storage.of(str(getattr(spec.places, name))) for name in names}
    return places if looks_like_a_table(target) else {**places, "score.target": Storage.of(target)}


def _unwritable(file: PipelineFile) -> Iterator[tuple[Path, str]]:
    """Places that cannot be written; of those below one root, the first."""
    rooted = False
    for name, address in places_written(file.spec).items():
        path: Path = tuple(name.split("."))
        below_root = path not in file.lines and ("root",) in file.lines
        try:
            check_places({name: address})
        except StorageError as error:
            reason = str(error).removeprefix(f"{name}: ")
            if not (below_root and rooted):
                yield (("root",), f"={file.spec.root!r}: {reason}") if below_root else (path, f": {reason}")
            rooted = rooted or below_root


def _constant_labels(project: Project, snapshot: SourceSnapshot) -> Iterator[tuple[Path, str]]:
    """Labels with less than two values; a column is read until there are two."""
    from sparkdl.pipeline.init.text import rows_of

    spec, source = project.spec, project.source
    if spec.transform is not None or source.arrow_address is None:
        return
    options = getattr(spec.source, "options", {})
    absent = {str(options.get("nullValue", ""))} if source.kind == "csv" else set()
    for name in spec.label:
        values: set[object] = set()
        try:
            for table in rows_of(source.kind, source.arrow_address, list(snapshot.files)).batches([name]):
                present = table.column(name).drop_null()
                present = present.filter(pc.is_finite(present)) if pa.types.is_floating(present.type) else present
                values |= {*pc.unique(present).slice(0, 3).to_pylist()} - absent
                if len(values) > 1:
                    break
            else:
                shown = f"is {values.pop()!r} in every row that has one" if values else "is missing in every row"
                yield ("label", name), f" {shown}, so that there is nothing to learn: name another column"
        except (SparkdlError, pa.ArrowException, KeyError):
            continue  # what cannot be read so, a run reads
