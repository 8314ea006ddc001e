"""Who hears of the end of a run: a command of the user's, a webhook.

Whatever goes wrong here is one line in the log: the run has ended as it has ended. What stands in an address beyond its
host is taken for a secret, and is neither logged nor in the record.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import ssl
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from sparkdl.documents.typed import encode
from sparkdl.observe import logger
from sparkdl.pipeline.file.resolved import host_of
from sparkdl.pipeline.spec import Notify
from sparkdl.pipeline.state.record import RunRecord

SECONDS = 60.0
"""Time that the command has, and the webhook."""
_LONGEST = 2000


def notify(asked: Notify, record: RunRecord, seconds: float = SECONDS) -> None:
    """Tell the command and the webhook, if the file asks for it after such an outcome.

    Args:
        asked: the section of the file.
        record: of the run.
        seconds: time that each has.
    """
    events = {record.outcome.replace(" ", "_"), *(["promoted"] if record.promoted else [])}
    if events.isdisjoint(asked.when):
        return
    content = encode(record)
    if asked.command is not None:
        failed = _run(shlex.split(asked.command), content, _variables(record), seconds)
        if failed:
            logger.warning("notify.command %s; the run is not touched by it", failed)
    if asked.webhook is not None:
        failed = _within(seconds, lambda: _post(str(asked.webhook), _with_text(record, content), seconds))
        if failed:
            host = host_of(asked.webhook)
            logger.warning("notify.webhook%s %s; the run is not touched by it", f" ({host})" if host else "", failed)


def _variables(record: RunRecord) -> dict[str, str]:
    """What a command that does not read JSON can go by."""
    variables = {
        "PIPELINE": record.pipeline,
        "RUN_ID": record.run_id,
        "OUTCOME": record.outcome.replace(" ", "_"),
        "EXIT_CODE": str(record.exit_code),
        "MESSAGE": record.message[:_LONGEST],
        "RECORD": record.places.get("record", ""),
        "REPORT": record.places.get("report", ""),
    }
    return {
        f"SPARKDL_{name}": value.replace("\0", "").encode("utf-8", "replace").decode()
        for name, value in variables.items()
    }


def _run(words: list[str], content: bytes, variables: dict[str, str], seconds: float) -> str:
    """Run a command without a shell; return what went wrong. What it prints goes to standard error, as it comes."""
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=2, stderr=2, env={**os.environ, **variables}, start_new_session=True
        )
    except (OSError, ValueError) as error:
        return f"could not be started ({getattr(error, 'strerror', None) or type(error).__name__})"
    try:
        process.communicate(content, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"was ended, since it ran longer than {seconds:g} s"
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            process.wait()
    return f"ended with {process.returncode}" if process.returncode else ""


def _with_text(record: RunRecord, content: bytes) -> bytes:
    """The record with one sentence under ``text``, which is what chat services show of a message."""
    sentence = f"{record.pipeline}: {record.outcome}. {record.message[:_LONGEST]}"
    report = record.places.get("report")
    return json.dumps({"text": f"{sentence}\n{report}" if report else sentence, **json.loads(content)}).encode()


class _NoRedirects(HTTPRedirectHandler):
    """An address that was written down is the one that is told; another gets neither the record nor the secret."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


def _post(address: str, content: bytes, seconds: float) -> str:
    """Send a POST; return what went wrong, without a word of the address."""
    opener = build_opener(_NoRedirects(), HTTPSHandler(context=ssl.create_default_context()))
    headers = {"Content-Type": "application/json", "User-Agent": "sparkdl"}
    try:
        with opener.open(Request(address, content, headers, method="POST"), timeout=seconds):
            return ""
    except HTTPError as error:
        error.close()
        moved = ", a redirect, which is not followed: write the address that it leads to" if error.code < 400 else ""
        return f"was answered with {error.code}{moved}"
    except Exception as error:  # the text of a ValueError, or of http.client's own, may hold the address
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, OSError):
            return f"cannot be reached ({cause.strerror or (cause.args or [type(cause).__name__])[-1]})"
        return f"cannot be reached ({type(cause).__name__})"


def _within(seconds: float, work: Callable[[], str]) -> str:
    """Do ``work`` for so long; a server that answers byte by byte is not waited for."""
    answers = [f"did not answer within {seconds:g} s"]
    thread = threading.Thread(target=lambda: answers.append(work()), name="sparkdl-notify", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[-1]
