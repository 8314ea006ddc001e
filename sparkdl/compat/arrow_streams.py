"""A table from a stream of Arrow's C interface, without pandas."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def read_stream(stream: Any) -> pa.Table:
    """All of a stream, as ``pa.table(stream)``.

    ``pa.table`` of pyarrow up to 26 asks whether its argument is a DataFrame, and imports pandas for that, which
    ``plan`` and ``status`` need for nothing else. This can go when it asks for the stream first.
    """
    return pa.RecordBatchReader.from_stream(stream).read_all()
