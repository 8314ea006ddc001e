"""What becomes of each row: kept, quarantined for a reason, or dropped as a duplicate."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkdl.columns.names import quoted, stands_in_sql
from sparkdl.compat.spark_errors import unlogged_queries
from sparkdl.documents.typed import encode
from sparkdl.errors import ConfigError, DataError, SchemaError, first_line
from sparkdl.observe import logger
from sparkdl.pipeline.spec import Expectation
from sparkdl.pipeline.spec.data import OUTCOMES
from sparkdl.pipeline.windows import MALFORMED, NO_TIME, WINDOW
from sparkdl.storage import sha256_hex

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

OUTCOME, BROKEN, SALT, SLOT = "_outcome", "_broken", "_salt", "_slot"
KEPT, DUPLICATE, NOT_DATED, NOT_WHOLE = OUTCOMES
"""Outcomes of rows that are valid, and of rows whose key another row has; every other outcome is a reason."""
OWN = frozenset({WINDOW, MALFORMED, OUTCOME, BROKEN, SALT, SLOT})
"""The columns that the pipeline adds."""
_RARE = "-7461"
"""What few lists hold, as text or number: looked for first, lists of 768 numbers are hashed in a third of the time."""


def validated(
    frame: DataFrame, expectations: Mapping[str, Expectation], key: Sequence[str], newest: Sequence[Column]
) -> DataFrame:
    """Add ``_outcome`` and ``_broken`` (the names of what a row broke that warns or fails) to every row.

    Every condition is evaluated once, and what is not true is broken, NULL included: so a row is never in both tables
    and never in neither. A row is refused for the first reason alone, and counts for each condition that fails a run,
    whatever else is wrong with it. Of rows with one key in one window one stays: a valid one before an invalid one, the
    newest by the source's time, then the one whose content hashes lowest, which no order of the rows changes.

    Args:
        frame: rows with ``_window``; with ``_salt``, too, which then follows from the key, where those of a window are
            gathered in several parts.
        expectations: by name.
        key: columns that tell rows apart; where there are none, no row is a duplicate.
        newest: the order by which the newest of rows with one key stays.

    Raises:
        ConfigError: a condition is no SQL over these columns.
        SchemaError: a column of the key is missing.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    missing = [name for name in key if name not in frame.columns]
    if missing:
        raise SchemaError(f"source.key names {missing[0]!r}, the rows have {frame.columns}: name one of these")
    broken = {
        name: ~F.coalesce(condition_of(frame, name, expectation.check), F.lit(False))
        for name, expectation in expectations.items()
    }
    reasons = [F.when(F.col(WINDOW) == NO_TIME, F.lit(NOT_DATED))]
    if MALFORMED in frame.columns:
        reasons.append(F.when(F.col(MALFORMED).isNotNull(), F.lit(NOT_WHOLE)))
    named = []
    for name, expectation in expectations.items():
        if expectation.action != "quarantine":
            named.append(F.when(broken[name], F.lit(name)))
        if expectation.action != "warn":
            is_broken = broken[name] if expectation.action == "quarantine" else F.array_contains(BROKEN, name)
            reasons.append(F.when(is_broken, F.lit(name)))
    broken_names = F.array_compact(F.array(*named)) if named else F.array().cast("array<string>")
    rows = frame.withColumn(BROKEN, broken_names).withColumn(OUTCOME, F.coalesce(*reasons, F.lit(KEPT)))
    if not key:
        return rows
    order = [F.col(OUTCOME) != KEPT, *newest, content_hash(frame)]
    gathered = [name for name in (WINDOW, SALT) if name in frame.columns]  # so that rows are not moved once more
    same_key = Window.partitionBy(*gathered, *[F.col(quoted(name)) for name in key]).orderBy(*order)
    keyed = ~F.greatest(F.lit(False), *[F.col(quoted(name)).isNull() for name in key])
    copy = keyed & (F.row_number().over(same_key) > 1)
    return rows.withColumn(OUTCOME, F.when(copy, F.lit(DUPLICATE)).otherwise(F.col(OUTCOME)))


def columns_of(frame: DataFrame) -> dict[str, str]:
    """The types of the columns by their names, in order, without those that the pipeline adds."""
    return {field.name: field.dataType.simpleString() for field in frame.schema.fields if field.name not in OWN}


def columns_hash(frame: DataFrame, without: Collection[str] = ()) -> str:
    """A hash of the columns' names and types, in order; those that the pipeline adds do not count, nor ``without``."""
    return sha256_hex(encode([[*item] for item in columns_of(frame).items() if item[0] not in without]))[:32]


def content_hash(frame: DataFrame, without: Collection[str] = ()) -> Column:
    """A hash of a row's values, bigint; the columns that the pipeline adds do not count, nor those of ``without``."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    fields = [field for field in frame.schema.fields if field.name not in OWN and field.name not in without]
    nested = (T.ArrayType, T.MapType, T.StructType, T.VariantType)
    if all(stands_in_sql(field.name) and not isinstance(field.dataType, nested) for field in fields):
        # The same as one text: of 500 columns a second goes by until Java was asked for each part of it.
        names = [quoted(field.name) for field in fields]
        return F.expr(f"xxhash64({', '.join(f'{name} IS NULL, {name}' for name in names)})")
    return F.xxhash64(*(part for field in fields for part in _hashed(F.col(quoted(field.name)), field.dataType)))


def _hashed(column: Column, kind: DataType) -> list[Column]:
    """What is hashed of a column, so that no two values give the same but by chance.

    Spark's hash passes over nulls, at the top and inside, and folds lists without their lengths: both are said first.
    It takes no map, which is a list of pairs here, and no variant, whose text stands for it.
    """
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    if isinstance(kind, T.MapType):
        pair = T.StructType().add("key", kind.keyType).add("value", kind.valueType)
        return _hashed(F.map_entries(column), T.ArrayType(pair))
    if isinstance(kind, T.StructType):
        return [column.isNull(), *(p for field in kind for p in _hashed(column.getField(field.name), field.dataType))]
    if not isinstance(kind, T.ArrayType):
        return [column.isNull(), F.to_json(column) if isinstance(kind, T.VariantType) else column]
    inner = kind.elementType
    if isinstance(inner, T.ArrayType | T.MapType | T.StructType | T.VariantType):
        items = F.transform(column, lambda item: F.xxhash64(*_hashed(item, inner)))
        return [column.isNull(), F.array_size(column), items]
    gaps = F.exists(column, F.isnull)
    if isinstance(inner, T.NumericType | T.StringType):  # false, and not null, says the same faster
        gaps = F.coalesce(F.array_contains(column, F.lit(_RARE).try_cast(inner)), F.lit(True)) & gaps
    gaps = F.when(gaps, F.transform(column, F.isnull))
    return [column.isNull(), F.array_size(column), F.xxhash64(gaps), column]


@dataclass(kw_only=True)
class Outcomes:
    """What became of the rows of one window.

    Attributes:
        rows: by outcome.
        broken: rows by the expectation that they broke, of those that warn or fail, whatever became of the rows.
        warned: those of them that were kept.
        content: a hash of the columns and of the rows kept that the order of these does not change.
        unlabelled: the same without the labels.
        everything: the same of all rows, with the labels.
    """

    rows: dict[str, int] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    warned: dict[str, int] = field(default_factory=dict)
    content: str = ""
    unlabelled: str = ""
    everything: str = ""

    @property
    def total(self) -> int:
        """All rows of the window."""
        return sum(self.rows.values())

    @property
    def quarantined(self) -> dict[str, int]:
        """Rows by the reason that they were refused for."""
        return {reason: rows for reason, rows in self.rows.items() if reason not in (KEPT, DUPLICATE)}


def check_shares(outcomes_by_window: Mapping[str, Outcomes], expectations: Mapping[str, Expectation]) -> None:
    """Compare what was broken with what each expectation bears, window by window; a warning is logged.

    Rows without a time are of no window that they could be a share of; they are refused as they are.

    Raises:
        DataError: an expectation with the action ``fail`` is broken by a greater share of rows than it bears; names
            all windows and expectations.
    """
    failed = []
    for window, outcomes in sorted(outcomes_by_window.items()):
        if window == NO_TIME:
            continue
        for name, expectation in expectations.items():
            broken = (outcomes.warned if expectation.action == "warn" else outcomes.broken).get(name, 0)
            # of one that puts rows aside none are counted
            if not broken or broken / outcomes.total <= expectation.above:
                continue
            text = (
                f"{name!r} ({expectation.check}) is broken by {broken} of the {outcomes.total} rows of window "
                f"{window}, above its {expectation.above:.2%}"
            )
            if expectation.action == "warn":
                logger.warning("expectation %s", text)
            else:
                failed.append(text)
    if failed:
        raise DataError(
            f"expectation {'; '.join(failed)}: nothing of this run was written; mend the source, or allow more with "
            "above in expect"
        )


def condition_of(frame: DataFrame, name: str, check: str) -> Column:
    """The condition ``check`` as a column, analysed against the rows at once.

    Raises:
        ConfigError: it is no SQL over these columns, or is neither true nor false; says ``expect.name``.
    """
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    try:
        with unlogged_queries():
            condition = F.expr(check)
            kind = frame.select(condition.alias("condition")).schema["condition"].dataType.typeName()
    except (AnalysisException, ParseException) as error:
        raise ConfigError(f"expect.{name}: {check!r} cannot be asked of the rows: {first_line(error)}") from error
    if kind != "boolean":
        raise ConfigError(f"expect.{name}: {check!r} is a {kind}: write a condition that is true or false")
    return condition
