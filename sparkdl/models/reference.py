"""One version of a model in one word: ``NAME@ALIAS`` or ``NAME@3``, and ``NAME:3`` as MLflow has it."""

from __future__ import annotations

from sparkdl.config import require


def reference(text: str) -> tuple[str, int | str | None]:
    """The name, and the version or alias; None for the latter where ``text`` is a name alone.

    Raises:
        ConfigError: there is nothing before or behind the sign.
    """
    name, sign, which = text.replace(":", "@", 1).partition("@")
    shown = name or "NAME"
    require(
        bool(name and (which or not sign)), f"{text!r} does not say which version: write {shown}@champion or {shown}@3"
    )
    return name, version_or_alias(which) if sign else None


def version_or_alias(text: str) -> int | str:
    """What a word names: digits are a version."""
    return int(text) if text.isascii() and text.isdigit() else text
