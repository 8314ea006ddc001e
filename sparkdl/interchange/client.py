"""MLflow's client for one address: opened quietly, patient for seconds, its failures one sentence.

Enters: the address of a tracking server or store. Leaves: MLflow's own client inside of a block, within which nothing
is sent anywhere else: its usage telemetry is off. What fails in the block is a ``StorageError``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sparkdl.config import require
from sparkdl.errors import SparkdlError, StorageError

__all__ = ["check_installed", "opened", "shown"]

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # its own 7 keep a publication waiting for four minutes
}
_MOST_LETTERS = 200
"""Of what MLflow says of a failure; pages of a proxy are longer."""


def check_installed() -> None:
    """Refuse what needs MLflow where it is not installed.

    Raises:
        ConfigError: names the extra.
    """
    require(importlib.util.find_spec("mlflow") is not None, "MLflow is not installed: pip install 'sparkdl[mlflow]'")


def shown(uri: str) -> str:
    """The address without what stands before its host or in its query; a password may hold any character."""
    place, host = re.match(r"(?s)((?:[\w+.-]+:)?/*)(.*)", uri).groups()  # type: ignore[union-attr]
    who, at, host = host.rpartition("@") if "///" not in place else ("", "", host)
    if "?" in who:  # of a password, or of a query with an @ in it
        return f"{place}***"
    host, asked, _ = host.partition("?")
    return f"{place}{'***@' if at else ''}{host}{'?***' if asked else ''}"


@contextmanager
def opened(uri: str, registry_uri: str | None) -> Iterator[Any]:
    """MLflow's client, once it has answered.

    Args:
        uri: of the tracking server or store, as MLflow takes it.
        registry_uri: of the model registry; None is what MLflow takes for ``uri``.

    Raises:
        StorageError: it does not answer, or refuses something.
        ConfigError: MLflow is not installed.
    """
    check_installed()
    with _set(_SETTINGS):
        try:
            _check_sqlite(uri)
            from mlflow import MlflowClient

            with _set({"MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}):
                client = MlflowClient(tracking_uri=uri, registry_uri=registry_uri)
                client.search_experiments(max_results=1)
            yield client
        except SparkdlError:
            raise
        except Exception as cause:  # its own, and those of requests, SQLAlchemy and the artifact stores, unwrapped
            raise StorageError(
                f"MLflow at {shown(uri)} did not take the model, {_said(cause, uri, registry_uri)}: start the server "
                "or correct its address, then mirror again"
            ) from cause


def _said(cause: Exception, *addresses: str | None) -> str:
    text = " ".join(str(cause).split())
    for uri in filter(None, addresses):
        _, asked, query = uri.partition("?")
        text = text.replace(uri, shown(uri)).replace(f"?{query}", "?***" if asked else "?")
    return f"{type(cause).__name__}: {text[:_MOST_LETTERS]}{'...' if len(text) > _MOST_LETTERS else ''}".rstrip(": ")


def _check_sqlite(uri: str) -> None:
    """Open the file that an SQLite address names: MLflow would try ten times, for more than a minute."""
    if uri.startswith("sqlite:///"):
        path = Path(uri.removeprefix("sqlite:///").partition("?")[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA schema_version").fetchone()


@contextmanager
def _set(values: dict[str, str]) -> Iterator[None]:
    """Variables of the environment, from which MLflow reads its settings, for a block; the user's own win."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
