"""SQL of a pipeline file that is certainly wrong; whether it is right, Spark alone can tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sparkdl.pipeline.file.problems import near_column, nearest

_TOKEN = re.compile(
    r"(?P<skip>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/|\d[\w.]*|\s+)"
    r"|(?P<quoted>`(?:[^`]|``)*`)|(?P<word>[^\W\d]\w*)|(?P<other>->|.)",
    re.DOTALL,
)
_SQL = frozenset(
    re.split(
        r"\s+",
        """all and any anti array as asc between binary bigint boolean byte case cast char collate cross cube current
        current_catalog current_database current_date current_schema current_time current_timestamp
        current_user date day days dayofyear dec decimal desc distinct div double else end escape except
        exists extract false filter first float following for from full group having hour hours if ilike in
        inner int integer intersect interval into is join last lateral left like limit localtime
        localtimestamp long map microsecond microseconds millisecond milliseconds minus minute minutes month
        months named_struct nanosecond nanoseconds natural not null nulls numeric offset on or order outer
        over partition preceding quarter range real regexp right rlike row rows second seconds select
        session_user short similar smallint some string struct table then time timestamp timestamp_ltz
        timestamp_ntz tinyint to trailing true try_cast unbounded union unique unknown user using values
        varchar variant week weeks when where window with within year years"""
        "",
    )
)


def misspelt(condition: str, columns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word that is no column but nearly one, with that column."""
    column_names = {name.lower() for name in columns}
    tokens = [token for token in _TOKEN.finditer(condition) if token["skip"] is None]
    texts = [token[0] for token in tokens]
    if {"->", "select"} & {text.lower() for text in texts}:
        return  # parameters of a lambda are no columns, nor are the columns of another table
    for at, token in enumerate(tokens):
        word = token["word"] or (token["quoted"] or "")[1:-1].replace("``", "`")
        previous, after = texts[at - 1].lower() if at else "", texts[at + 1] if at + 1 < len(texts) else ""
        plain = token["quoted"] is None
        if not word or word.lower() in column_names or (plain and word.lower() in _SQL):
            continue
        if previous in (".", ":", "as") or after in (".", ":") or (plain and after == "("):
            continue  # a field, a type, a function
        near = near_column(word, columns)
        if near is not None:
            yield word, near


def sql_problem(select: str) -> str:
    """Why a text is no SELECT from ``source``, as the end of a sentence; empty if it may be one."""
    tokens = [token for token in _TOKEN.finditer(select) if token["skip"] is None]
    texts = [token[0] for token in tokens]
    if texts.count("(") != texts.count(")"):
        return ": a parenthesis has no partner: add or remove one"
    if {"'", '"', "`"} & set(texts):
        return ": a quotation mark has no partner: add or remove one"
    words = [token[0].strip("`").lower() for token in tokens if token["word"] or token["quoted"]]
    if not words or words[0] not in ("select", "with", "from", "table", "values"):
        return " is no SELECT: begin with SELECT or WITH"
    if "source" not in words:
        near = nearest("source", words)
        return f": {f'reads {near!r} and ' if near else ''}never reads the rows: write FROM source"
    return ""
