"""CSV and JSON files that nobody has described: how they are written, and a sample of their rows with types.

Blocks all over the files are read, never a whole large file but to count a key.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from sparkdl.errors import DataError
from sparkdl.pipeline.init.count import count_hours
from sparkdl.pipeline.init.table import PACKED, SAMPLE_ROWS, DeltaRows, FileRows, ParquetRows, Sample
from sparkdl.pipeline.init.values import (
    NOTHING,
    PLACES,
    TIMES,
    DateFormat,
    any_match,
    date_format_of,
    ddl,
    has_three_places,
    have_commas,
    nothing_of,
    strays_of,
    typed,
)
from sparkdl.pipeline.sources.files import first_lines, header_names, unpacked
from sparkdl.pipeline.spec.base import count_of
from sparkdl.storage import Storage

_BLOCK, _BLOCKS = 1 << 20, 32
_WHOLE = 32 << 20
"""Bytes of files that are read whole."""
_LINES = 100_000
"""That are taken at once where Arrow alone does not read them."""
_COUNTED = 4 << 30
"""Bytes of text in which a key is counted."""
_BYTE_ORDERS = (b"\xff\xfe", b"\xfe\xff")
"""That files of UTF-16 begin with, if they do not only show by their zero bytes."""

_Block = tuple[str, bytes, bool]
"""A file, whole lines of it, and whether they are its first."""


class _TextRows(FileRows):
    def __init__(self, kind: str, path: str, files: Sequence[str]) -> None:
        super().__init__(kind, path, files)
        self._bytes = sum(Storage.of(file).size() for file in files)
        self._date_formats: dict[str, DateFormat] = {}

    @property
    def _countable(self) -> bool:
        return self._bytes <= _COUNTED

    def _blocks(self) -> tuple[list[_Block], bool]:
        """Blocks from all over the files, and whether these are all that there is."""
        blocks: list[_Block] = []
        packed = any(file.endswith(PACKED) for file in self._files)
        if packed or self._bytes <= _WHOLE:
            room, whole_files = _WHOLE, 0
            for file in self._files[:: max(1, len(self._files) // (4 * _BLOCKS))]:
                lines, fits = first_lines(file, max(_BLOCK, room // len(self._files)) if packed else room)
                blocks.append((file, lines, True))
                room, whole_files = room - len(lines), whole_files + fits
                if room <= 0:
                    break
            return blocks, whole_files == len(self._files)
        chosen = self._files[:: max(1, len(self._files) // _BLOCKS)][:_BLOCKS]
        per_file = max(1, _BLOCKS // len(chosen))
        for file in chosen:
            size = Storage.of(file).size()
            for start in (block * size // per_file for block in range(per_file)):
                data = Storage.of(file).read_bytes(start, min(_BLOCK, size - start))
                first, last = 0 if start == 0 else data.find(b"\n") + 1, data.rfind(b"\n") + 1
                blocks.append((file, data[first : last or len(data)], start == 0))
        return blocks, False

    def _sample_of(self, rows: pa.Table, blocks: Sequence[_Block], *, are_all: bool) -> Sample:
        """Not too many of the rows of blocks."""
        read = rows.num_rows
        self.about = int(read * max(1.0, self._bytes / max(1, sum(len(lines) for _, lines, _ in blocks))))
        if read > SAMPLE_ROWS:
            rows = rows.take(np.sort(np.random.default_rng(0).choice(read, SAMPLE_ROWS, replace=False)))
        complete = are_all and rows.num_rows == read
        of = f"{read:,} rows" if are_all else f"{self._bytes >> 20:,} MiB in {len(self._files):,} files"
        coverage = f"all {of}" if complete else f"{rows.num_rows:,} rows, from places all over the {of}"
        return Sample(rows=rows, complete=complete, coverage=coverage)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """These columns of every row, as texts."""
        for file in self._files:
            with Storage.of(file).open_input() as stream:
                for rows in self._texts(file, unpacked(stream, file), columns):
                    yield self._with_partition(rows, file, columns)

    @abstractmethod
    def _texts(self, file: str, stream: Any, columns: Sequence[str]) -> Iterable[pa.Table]:
        """Rows of a file with those of the columns that stand in it."""

    def hours(self, column: str) -> Mapping[str, int] | None:
        """Read this column of every file; what is no time there, though it was in the sample, is left out."""
        if not self._countable:
            return None
        read = self._date_formats[column].read if column in self._date_formats else typed
        times = (read(rows.column(0).combine_chunks()) for rows in self.batches([column]))
        return count_hours(values for values in times if pa.types.is_temporal(values.type))


class CsvRows(_TextRows):
    """CSV files."""

    def __init__(self, kind: str, path: str, files: Sequence[str]) -> None:
        super().__init__(kind, path, files)
        head, _ = first_lines(self._files[0])
        if head[:2] in _BYTE_ORDERS or 4 * head.count(0) > len(head):
            raise DataError(f"{self._files[0]} is written in UTF-16: save it as CSV in UTF-8")
        self._encoding, _ = _encoding_of([head])
        self._escape: str | Literal[False] = False
        text = head.decode(self._encoding, errors="replace").removeprefix("\ufeff")
        self._sep = _separator_of(text)
        first = next(csv.reader(io.StringIO(text, newline=""), delimiter=self._sep), [])
        stripped = csv.reader(io.StringIO(text, newline=""), delimiter=self._sep, skipinitialspace=True)
        lines = list(itertools.islice(stripped, 20))
        self._padded = len(first) > 1 and all(cell.startswith(" ") for cell in first[1:])
        first = lines[0] if self._padded else first
        if not first:
            raise DataError(f"{self._files[0]} has no line: remove it, or write it again")
        self._headed = _is_header(*lines)
        self._names = header_names(first) if self._headed else [f"_c{index}" for index in range(len(first))]
        self._names_are_made = self._headed and self._names != first

    def sample(self) -> Sample:
        """Rows of blocks from all over the files, with the types that their texts show."""
        blocks, are_all = self._blocks()
        self._encoding, unreadable = _encoding_of([lines for _, lines, _ in blocks])
        rows, other_lengths = self._rows_of(blocks)
        if other_lengths and any(b"\\" in lines for _, lines, _ in blocks):  # before quotes that are part of a value?
            self._escape = "\\"
            escaped, fewer = self._rows_of(blocks)
            if len(fewer) < len(other_lengths):
                rows, other_lengths = escaped, fewer
            else:
                self._escape = False
        if len(other_lengths) > rows.num_rows:
            length, lines = Counter(other_lengths).most_common(1)[0]
            raise DataError(
                f"the first line of {self._files[0]} has {count_of(len(self._names), 'cell')}, and {lines:,} others "
                f"have {length}: remove what stands above the names of its columns, or correct these"
            )
        if not rows.num_rows:
            raise self._nothing()
        cells = {name: rows.column(name).combine_chunks() for name in self._names}
        present = {name: column.drop_null() for name, column in cells.items()}
        nothing = nothing_of(list(present.values()))
        self.source["options"] = self._reader_options(list(present.values()))
        notes = []
        if unreadable:
            number = count_of(unreadable, "character")
            notes.append(f"{number} not of UTF-8 read as \ufffd: write the file again, or name its encoding")
        if nothing is not None:
            self.source["options"] |= {"nullValue": nothing, "emptyValue": nothing}  # else "" in quotes is no number
            notes.append(f"{nothing!r} stands where a number is missing")
            cells = {name: pc.if_else(pc.equal(column, nothing), None, column) for name, column in cells.items()}
            present = {name: column.drop_null() for name, column in cells.items()}
        comma = self._sep != "," and have_commas(list(present.values()))
        if comma:
            self.source["options"]["locale"] = "de-DE"
            pointed = ", ".join(name for name, texts in present.items() if has_three_places(texts))
            notes.append(
                f"numbers have decimal commas, which Spark reads as DECIMAL in this locale, rounded to {PLACES} places"
            )
            notes += [f"the dots of {pointed} are read as decimal points"] if pointed else []
        self.notes["options"] = "; ".join(notes)
        fits, examples = pa.repeat(True, rows.num_rows), []
        for name, column in cells.items():
            is_stray = strays_of(column)
            if is_stray is not None:
                fits = pc.and_not(fits, is_stray)
                shown = ", ".join(f"{text!r:.30}" for text in pc.unique(column.filter(is_stray))[:3].to_pylist())
                examples.append(f"{name} is {shown}")
        such = f", such as those where {', '.join(examples)}" if examples else ""
        self.notes["schema"] = (
            f"so that a column has one type whatever comes; a row that does not fit is put aside{such}"
        )
        columns = {name: typed(column.filter(fits), comma=comma) for name, column in cells.items()}
        columns |= self._dated(columns)
        self.source["schema"] = ddl(pa.table(columns).schema)
        for name in self.partitions:
            columns.setdefault(name, rows.column(name).filter(fits))
        sample = self._sample_of(pa.table(columns), blocks, are_all=are_all)
        lines_passed_over = count_of(len(other_lengths), "line")
        passed_over = f"; {lines_passed_over} of another number of cells passed over" if other_lengths else ""
        return replace(sample, coverage=sample.coverage + passed_over)

    def _rows_of(self, blocks: Sequence[_Block]) -> tuple[pa.Table, list[int]]:
        """The rows of blocks, as texts; and the cells of each line that has another number of them."""
        other_lengths: list[int] = []
        tables = [
            self._with_partition(rows, file)
            for file, lines, begins in blocks
            for rows in self._read(io.BytesIO(lines), begins, self._names, other_lengths)
        ]
        empty = pa.table({name: pa.array([], pa.string()) for name in self._names})
        return pa.concat_tables([empty, *tables], promote_options="default"), other_lengths

    def _read(
        self, stream: IO[bytes], begins: bool, columns: Sequence[str], other_lengths: list[int]
    ) -> Iterator[pa.Table]:
        """Some columns of a file or of lines of it, as texts.

        Args:
            stream: the bytes.
            begins: whether a header comes first, where the files have one.
            columns: to read.
            other_lengths: gets the number of cells of lines that have another number than the first, and are left out.
        """

        def skip(row: pacsv.InvalidRow) -> str:
            other_lengths.append(row.actual_columns)
            return "skip"

        for text in self._unpadded(stream) if self._padded else [stream]:
            try:
                reader = pacsv.open_csv(
                    codecs.EncodedFile(text, "utf-8", self._encoding, errors="replace"),
                    pacsv.ReadOptions(
                        column_names=self._names, skip_rows=int(begins and self._headed), block_size=1 << 24
                    ),
                    pacsv.ParseOptions(
                        delimiter=self._sep, newlines_in_values=True, invalid_row_handler=skip, escape_char=self._escape
                    ),
                    pacsv.ConvertOptions(
                        column_types=dict.fromkeys(columns, pa.string()), include_columns=columns, null_values=[""],
                        strings_can_be_null=True,
                    ),
                )  # fmt: skip
                for batch in reader:
                    yield pa.Table.from_batches([batch])
            except pa.ArrowInvalid as error:
                if "Empty CSV" not in str(error):
                    message = f"{self.source['path']} is no CSV file ({error}): give a Parquet file instead"
                    raise DataError(message) from error
            begins = False

    def _unpadded(self, stream: IO[bytes]) -> Iterator[IO[bytes]]:
        """The lines without blanks behind separators: of a cell in quotes Arrow would take these for a part of it."""
        text = io.TextIOWrapper(stream, self._encoding, errors="replace", newline="")
        rows = csv.reader(text, delimiter=self._sep, skipinitialspace=True)
        while chunk := list(itertools.islice(rows, _LINES)):
            out = io.StringIO()
            csv.writer(out, delimiter=self._sep, lineterminator="\n").writerows(chunk)
            yield io.BytesIO(out.getvalue().encode(self._encoding, errors="replace"))

    def _reader_options(self, values: Sequence[pa.Array]) -> dict[str, Any]:
        """Options that Spark needs to part the same cells."""
        options: dict[str, Any] = {} if self._sep == "," else {"sep": self._sep}
        if self._headed:  # else the columns of another file are taken by order, as they have to be where names are made
            options["enforceSchema"] = self._names_are_made
        else:
            options["header"] = False
        if self._padded:
            options["ignoreLeadingWhiteSpace"] = True
        if self._encoding != "utf-8":
            options["encoding"] = self._encoding
        odd = any('"' in name for name in self._names) or any(any_match(texts, r'["\\]') for texts in values)
        if odd and not self._escape:  # Spark's own is the backslash
            options["escape"] = '"'
        if any(any_match(texts, r"[\r\n]") for texts in values):
            options["multiLine"] = True
        return options

    def _dated(self, columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """Texts that are dates written with the day or the month first, as dates: Spark takes one format of each."""
        formats = {
            name: written
            for name, column in columns.items()
            if pa.types.is_string(column.type) and (written := date_format_of(column)) is not None
        }
        for kind, option in ((pa.date32(), "dateFormat"), (pa.timestamp("us", "UTC"), "timestampFormat")):
            of_kind = {name: written for name, written in formats.items() if written.type == kind}
            if len(set(of_kind.values())) == 1 and all(column.type != kind for column in columns.values()):
                self._date_formats |= of_kind
                self.source["options"][option] = next(iter(of_kind.values())).spark
        return {name: written.read(columns[name]) for name, written in self._date_formats.items()}

    def _texts(self, file: str, stream: Any, columns: Sequence[str]) -> Iterable[pa.Table]:
        names = [name for name in columns if name in self._names] or self._names[:1]
        return self._read(stream, True, names, [])


class JsonRows(_TextRows):
    """Files with one JSON object a line."""

    def sample(self) -> Sample:
        """Rows of blocks from all over the files."""
        blocks, are_all = self._blocks()
        objects = [(file, list(_objects(file, [lines]))) for file, lines, _ in blocks]
        rows = [row for _, of_block in objects for row in of_block]
        if not rows:
            raise self._nothing()
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: _column([row.get(name) for row in rows]) for name in names}
        columns = {  # Spark takes no number in quotes for a number
            name: typed(column, TIMES) if pa.types.is_string(column.type) else column
            for name, column in columns.items()
        }
        self.source["schema"] = ddl(pa.table(columns).schema)
        self.notes["schema"] = "so that a column has one type whatever comes"
        tables, start = [], 0
        for file, of_block in objects:
            tables.append(self._with_partition(pa.table(columns).slice(start, len(of_block)), file))
            start += len(of_block)
        return self._sample_of(pa.concat_tables(tables, promote_options="permissive"), blocks, are_all=are_all)

    def _texts(self, file: str, stream: Any, columns: Sequence[str]) -> Iterable[pa.Table]:
        rows = _objects(file, io.BufferedReader(stream))
        while chunk := list(itertools.islice(rows, _LINES)):
            cells = {"": pa.nulls(len(chunk))}  # so that there are rows where all columns are of the folder
            for name in set(columns) - self._partition_by_file[file].keys():
                texts = [None if row.get(name) is None else str(row[name]) for row in chunk]
                cells[name] = pa.array(texts, pa.string())
            yield pa.table(cells)


def _column(values: list[Any]) -> pa.Array:
    """Values of one type as they are; of several, or of more than 64 bits, as the texts that Spark makes of them."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array(
            [
                value
                if value is None or isinstance(value, str)
                else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                for value in values
            ]
        )


def _objects(file: str, parts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in (line for part in parts for line in part.splitlines()):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file} has a line that is no JSON ({error}): write one object a line") from error
        if not isinstance(row, dict):
            raise DataError(f"{file} has a line that is no JSON object: write one object a line")
        yield row


def _encoding_of(blocks: Sequence[bytes]) -> tuple[str, int]:
    """How texts are written, and how many characters of them are not: most of those beyond ASCII decide."""
    beyond_ascii = unreadable = 0
    for block in blocks:
        text = block.decode("utf-8", errors="replace")
        beyond_ascii += len(text) - len(text.encode("ascii", errors="ignore"))
        unreadable += text.count("\ufffd")
    return ("ISO-8859-1", 0) if unreadable > beyond_ascii / 2 else ("utf-8", unreadable)


def _is_header(first: Sequence[str], *rows: Sequence[str]) -> bool:
    """Whether the first line has no number, or names at least one column of numbers."""

    def is_number(cell: str) -> bool:
        return re.fullmatch(r"\s*-?\d+([.,]\d+)?\s*", cell) is not None

    if not any(is_number(cell) or not cell for cell in first[1:] or first):
        return True
    columns = ((cell, [row[index] for row in rows if index < len(row)]) for index, cell in enumerate(first))
    return any(
        2 * sum(map(is_number, cells)) > len(cells)
        for cell, cells in columns
        if cell.strip() and not is_number(cell) and cell.strip() not in NOTHING
    )


def _separator_of(text: str) -> str:
    """What parts the cells: it parts every line into the same number of them, and into most.

    Of 2,000 files with quoted and unquoted texts full of the other separators, ``csv.Sniffer`` mistakes 65.
    """
    lines = text.splitlines()[:200]

    def cells(sep: str) -> tuple[float, int]:
        counts = Counter(len(row) for row in csv.reader(lines, delimiter=sep) if row)
        common, rows = counts.most_common(1)[0] if counts else (0, 0)
        return (rows / max(1, sum(counts.values())) if common > 1 else 0.0), common

    sep = max((",", ";", "\t", "|"), key=cells)
    return sep if cells(sep)[1] > 1 else " " if cells(" ") > (0.9, 1) else ","


def rows_of(kind: str, table: str, files: Sequence[str]) -> FileRows:
    """The rows of files.

    Args:
        kind: of source.
        table: their address.
        files: addresses of each; of a Delta table its log tells them.
    """
    kinds: Mapping[str, type[FileRows]] = {"csv": CsvRows, "json": JsonRows, "delta": DeltaRows}
    return kinds.get(kind, ParquetRows)(kind, table, files)
