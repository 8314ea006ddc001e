"""From a table to the folder of a pipeline, top to bottom; Spark is started only for a table of its catalog."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from sparkdl.errors import ConfigError, ConflictError, SchemaError
from sparkdl.pipeline.file import PipelineFile, loads
from sparkdl.pipeline.init.features import choose
from sparkdl.pipeline.init.profile import profiles_of
from sparkdl.pipeline.init.roles import find_key, find_label, find_time
from sparkdl.pipeline.init.split import plan_for
from sparkdl.pipeline.init.table import CatalogRows, Rows, kind_of
from sparkdl.pipeline.init.text import rows_of
from sparkdl.pipeline.init.values import numbers_of_texts
from sparkdl.pipeline.init.write import pipeline_text
from sparkdl.pipeline.rows.expect import OWN
from sparkdl.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PLAIN_NETWORK = ("class TabularNet(", "class _Block(")
"""How what the ensemble does not need begins in the module of networks."""


@dataclass(frozen=True, kw_only=True)
class Initialised:
    """What was written.

    Attributes:
        folder: that it lies in.
        files: their names.
        file: the pipeline file, read back.
        coverage: what was looked at, in words.
        label: what is predicted, and why, in words.
        suspects: features that predict the label nearly alone, and may be known only with it.
        question: what the label's values leave open, in words; empty where nothing is.
    """

    folder: str
    files: Sequence[str]
    file: PipelineFile
    coverage: str
    label: str
    suspects: Sequence[str]
    question: str = ""

    @property
    def path(self) -> str:
        """Where the pipeline file lies."""
        return f"{self.folder}/{self.files[0]}"

    def lines(self) -> list[tuple[str, str]]:
        """What a person wants to know at once: a name and a text each."""
        spec = self.file.spec
        may_tell = (
            f"{', '.join(self.suspects)} {'tells' if len(self.suspects) == 1 else 'tell'} the label nearly alone: take "
            "out of the file what is known only afterwards"
        )
        return [
            ("looked at", self.coverage),
            ("label", self.label),
            ("key", ", ".join(spec.source.key) or "none: see the file"),
            ("features", f"{len(spec.features)}; what was left out, and why, stands in the file"),
            *([("WARNING", may_tell)] if self.suspects else []),
            *([("QUESTION", self.question)] if self.question else []),
            ("written", f"{self.folder}: {', '.join(self.files)}"),
        ]


def init(
    place: str,
    table: str,
    label: str | None = None,
    spark: SparkSession | None = None,
    now: datetime | None = None,
    *,
    label_type: str | None = None,
    with_model: bool = False,
) -> Initialised:
    """Look at a table and write a pipeline for it.

    Args:
        place: the folder to make; its last part is the pipeline's name.
        table: a path or URI of a Delta table or of Parquet, CSV or JSON files, or ``catalog.schema.table``.
        label: the column to predict; None guesses.
        spark: the session to read a table of a catalog with; None opens one for it.
        now: the time that it is.
        label_type: ``regression``, ``binary`` or ``multiclass``; None goes by the label's values.
        with_model: write sparkdl's own network out, and let the file name it, so that it can be changed.

    Raises:
        ConfigError: the name cannot be one, the folder is there already, or the table is of no kind that is known.
        SchemaError: there is no such label, or Spark could not tell or read some columns.
        DataError: there are no rows, or nothing that can be predicted.
        StorageError: the table cannot be read, or the folder not be written.
    """
    folder, name = _new_folder(place)
    rows = _opened(table, spark)
    sample = rows.sample()
    table_as_numbers, casts = numbers_of_texts(sample.rows)
    sample = replace(sample, rows=table_as_numbers)
    _check_names(sample.rows.column_names)
    profiles = profiles_of(sample.rows)
    chosen = find_label(profiles, label, label_type)
    counts = sample if sample.complete else rows
    when = find_time(counts.hours, profiles, rows.partitions, chosen.name, now or datetime.now(UTC))
    key = find_key(counts.count, profiles, when, chosen)
    choices = choose(profiles, sample.rows, chosen, key, when)
    read_columns = {chosen.name, *(choice.column for choice in choices if choice.options)} - set(key.columns)
    text = pipeline_text(
        name=name,
        table=table,
        rows=rows,
        coverage=sample.coverage,
        profiles=profiles,
        choices=choices,
        key=key,
        when=when,
        label=chosen,
        plan=plan_for(rows.about, sample, profiles, key, when, chosen),
        casts={column: sql for column, sql in casts.items() if column in read_columns},
        factory=f"{_module_of(name)}:network",
        with_model=with_model,
    )
    read = loads(text, name=f"{name}.yaml", folder=str(folder.local_path()))
    return Initialised(
        folder=folder.uri,
        files=_write_folder(folder, name, text, with_model=with_model),
        file=read,
        coverage=sample.coverage,
        label=f"{chosen.name}, {chosen.type}, {chosen.why}",
        suspects=[choice.column for choice in choices if choice.suspect],
        question=chosen.question,
    )


def _new_folder(place: str) -> tuple[Storage, str]:
    """The folder that ``place`` names, and the pipeline's name, which is the last part of it."""
    folder = Storage.of(place if "://" in place else Path(place).expanduser())
    if folder.local_path() is None:
        raise ConfigError(f"{place} is no folder of this machine, where init writes: name one, and copy it from there")
    name = folder.uri.rpartition("/")[2]
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a pipeline: use letters, digits, - and _, such as churn")
    if folder.exists():
        raise ConfigError(f"{folder.uri} is there already, and init overwrites nothing: choose another name")
    return folder, name


def _opened(table: str, spark: SparkSession | None) -> Rows:
    kind, files = kind_of(table)
    if kind == "catalog":
        if spark is None:
            from sparkdl.pipeline.session import open_session

            only = f"source: {{kind: delta, table: {table}}}\nfeatures: {{x: number}}\nlabel: {{y: binary}}"
            spark = open_session(loads(only, name="init.yaml").spec)
        return CatalogRows(table, spark)
    return rows_of(kind, table, files)


def _check_names(names: Sequence[str]) -> None:
    duplicates = [name for name, count in Counter(name.lower() for name in names).items() if count > 1]
    if duplicates:
        spellings = [name for name in names if name.lower() == duplicates[0]]
        raise SchemaError(f"the columns {spellings} differ by case alone, which Spark does not tell apart: rename one")
    reserved = sorted(OWN & set(names))
    if reserved:
        raise SchemaError(f"the table has a column {reserved[0]!r}, a name that pipelines use themselves: rename it")


def _module_of(name: str) -> str:
    """The Python module of the model stub."""
    plain = re.sub(r"\W", "_", name).lower()
    return f"{plain if plain[0].isalpha() else f'p_{plain}'}_model"


def _write_folder(folder: Storage, name: str, text: str, *, with_model: bool) -> list[str]:
    """Write all files, and the folder appears with them; return their names."""
    module = _module_of(name)
    words = {
        "name": name,
        "module": module,
        "test": f"test_{module}.py",
        "schedule": f"{name}.cron",
        "what": "the network, sparkdl's own written out: the pipeline uses this one"
        if with_model
        else "a network of your own to begin with; the pipeline uses sparkdl's until you name it",
        "folder": shlex.quote(str(folder.local_path())).replace("%", r"\%"),
        "source": _own_network() if with_model else "",
    }
    templates = {
        f"{module}.py": "own_network.py.txt" if with_model else "network.py.txt",
        words["test"]: "test_network.py.txt",
        words["schedule"]: "schedule.cron.txt",
        "README.md": "README.md.txt",
    }
    files, folder_of_templates = {f"{name}.yaml": text}, resources.files(__package__) / "templates"
    for file, template in templates.items():
        files[file] = Template((folder_of_templates / template).read_text(encoding="utf-8")).substitute(words)
    try:
        for file, content in files.items():
            folder.child(file).write_if_absent(content.encode())
    except ConflictError:  # somebody else is writing there at this moment
        raise
    except BaseException:
        folder.delete(recursive=True)
        raise
    return list(files)


def _own_network() -> str:
    """The source of sparkdl's own network and its parts; torch is not imported for it."""
    module = importlib.util.find_spec("sparkdl.models.networks")
    assert module is not None
    assert module.origin is not None
    source = Path(module.origin).read_text(encoding="utf-8")
    definitions = source.partition("\n__all__ = ")[2].partition("\n\n")[2].rstrip("\n").split("\n\n\n")
    return "\n\n\n".join(text for text in definitions if not text.startswith(_PLAIN_NETWORK))
