"""A pipeline file against its source's columns, and against all else that can be told before a run.

Enters: the context of a run that may never begin. Leaves: what is wrong, by path of the file; and where the columns
cannot be told without Spark, or the source cannot be reached from here, why.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.errors import IntegrityError, SchemaError, SparkdlError, StorageError
from sparkdl.pipeline.analysis import analysed
from sparkdl.pipeline.file.columns import misfits
from sparkdl.pipeline.file.conditions import sql_problem
from sparkdl.pipeline.file.problems import Path
from sparkdl.pipeline.sources.base import Columns
from sparkdl.pipeline.sources.table_formats import TableFilesError
from sparkdl.pipeline.state.context import Context
from sparkdl.storage import Storage, check_places
from sparkdl.storage.address import looks_like_a_table

__all__ = ["check_source", "places_written", "problems_of"]


def check_source(context: Context) -> str:
    """Hold the file against the columns of its source.

    A source that cannot be reached says nothing about the file: a file is often checked where the rows are not.

    Returns:
        what could not be checked, in words; empty where all of it was.

    Raises:
        PipelineFileError: columns are missing, or have types that their use does not fit.
        SchemaError: Spark cannot read them, or the source has no such partitions.
        IntegrityError: the log of a Delta table names a file outside of its folder.
        TableFilesError: the files are those of a Delta, Iceberg or Hudi table.
    """
    found, unknown = _columns(context)
    if found is not None and found.whole:
        context.file.check_columns(found.types)
    return unknown


def problems_of(context: Context) -> tuple[list[tuple[Path, str]], str]:
    """Everything that would end a run of this file, as far as that can be told before one, and what cannot be told.

    Columns, the transform's SQL, a label that has one value, and places that cannot be written.
    """
    spec, problems, unknown = context.spec, list(_unwritable(context)), []
    try:
        found, why = _columns(context)
    except (SchemaError, IntegrityError, TableFilesError) as error:
        return [*problems, (("source",), f": {error}")], ""
    if found is not None and found.whole:
        analysis = analysed(spec, found.types)
        missing = list(misfits(spec, found.types, analysis.transformed))
        told = {path[:2] for path, _ in missing}
        problems += [(path, sentence) for path, sentence in analysis.problems if path[:2] not in told]
        problems += missing
        problems += [problem for problem in _constant_labels(context) if problem[0] not in told]
        unknown.append(analysis.unknown)
    elif spec.transform is not None and spec.transform.sql is not None:
        sentence = sql_problem(spec.transform.sql)
        problems += [(("transform", "sql"), sentence)] if sentence else []
        unknown.append("transform.sql was read and not analysed, since not all columns are known")
    return problems, "; ".join(filter(None, [why, *unknown]))


def places_written(context: Context) -> dict[str, Storage]:
    """The places that a run writes to, by their keys in the file."""
    places, target = context.spec.places, str(context.spec.score.target)
    found = {
        f"places.{name}": Storage.of(str(getattr(places, name))) for name in ("runs", "tables", "shards", "registry")
    }
    return found if looks_like_a_table(target) else {**found, "score.target": Storage.of(target)}


def _columns(context: Context) -> tuple[Columns | None, str]:
    """What is known of the source's columns, and what is not, in words."""
    try:
        found = context.source.columns(context.snapshot)
    except (SchemaError, IntegrityError, TableFilesError):
        raise
    except SparkdlError as error:
        return None, f"the columns of the source were not looked at: {error}"
    if found.why_not:
        return None, f"the columns of the source were not looked at: {found.why_not}"
    absent = [] if found.whole else context.file.columns_not_in(found.types)
    names = ", ".join(map(repr, absent))
    return found, f"the first rows of the source do not have {names}: check the spelling" if absent else ""


def _unwritable(context: Context) -> Iterator[tuple[Path, str]]:
    """Places that cannot be written; of those below one root, the first."""
    lines, rooted = context.file.lines, False
    for name, place in places_written(context).items():
        path: Path = tuple(name.split("."))
        below_root = path not in lines and ("root",) in lines
        try:
            check_places({name: place})
        except StorageError as error:
            reason = str(error).removeprefix(f"{name}: ")
            if not (below_root and rooted):
                yield (("root",), f"={context.spec.root!r}: {reason}") if below_root else (path, f": {reason}")
            rooted = rooted or below_root


def _constant_labels(context: Context) -> Iterator[tuple[Path, str]]:
    """Labels with less than two values; a column is read until there are two."""
    for name in context.spec.label if context.spec.transform is None else ():
        values: set[object] = set()
        absent = {str(getattr(context.spec.source, "options", {}).get("nullValue", ""))}
        try:
            for column in _values(context, name):
                present = column.drop_null()
                present = present.filter(pc.is_finite(present)) if pa.types.is_floating(present.type) else present
                values |= {*pc.unique(present).slice(0, 3).to_pylist()} - absent
                if len(values) > 1:
                    break
            else:
                shown = f"is {values.pop()!r} in every row that has one" if values else "is missing in every row"
                yield ("label", name), f" {shown}, so that there is nothing to learn: name another column"
        except (SparkdlError, pa.ArrowException, KeyError):
            continue  # what cannot be read so, a run reads


def _values(context: Context, name: str) -> Iterator[pa.ChunkedArray]:
    from sparkdl.pipeline.init.text import rows_of

    source = context.source
    if source.arrow_address is None:
        raise KeyError(name)
    for table in rows_of(source.kind, source.arrow_address, list(context.snapshot.files)).batches([name]):
        yield table.column(name)
