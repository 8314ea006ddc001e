"""The page around the report: one file, no script, nothing loaded from anywhere.

Enters: a title and sections. Leaves: an HTML document whose policy forbids whatever it does not use: a browser runs no
script of it, loads nothing, sends no form, and takes no style but the one whose hash stands in the policy.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib import resources

from sparkdl.pipeline.report.html import Child, Html, tag

__all__ = ["GENERATOR", "document"]

GENERATOR = "sparkdl report 2"
"""What wrote the page; raise the number when the page changes, and ``sparkdl report`` writes it anew."""


def document(title: str, children: Iterable[Child]) -> str:
    """A whole HTML document.

    Args:
        title: of the page.
        children: its sections; None is left out.
    """
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    known = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{known}'; base-uri 'none'; form-action 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="generator", content=GENERATOR),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Html(style)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', children), lang='en').text}\n"
