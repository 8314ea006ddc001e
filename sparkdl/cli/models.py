"""``sparkdl models list | show | history | promote | rollback``: the model registry.

Enters: parsed words. Leaves: tables on standard output.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from sparkdl.cli.words import add_command, time_text

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add them to the parser of ``sparkdl``."""
    models = commands.add_parser("models", help="the model registry").add_subparsers(required=True, metavar="ACTION")
    for name, command, text, words in (
        ("list", _list, "models, or the versions of one", ("[NAME]",)),
        ("show", _show, "one version: metrics, parameters, lineage", ("NAME", "WHICH")),
        ("history", _history, "what happened to a model", ("NAME",)),
        ("promote", _promote, "point an alias to a version", ("NAME", "VERSION")),
        ("rollback", _rollback, "point an alias back to what it pointed to before", ("NAME",)),
    ):
        action = add_command(models, name, command, text)
        action.add_argument("registry", help="address of the registry")
        for word in words:
            optional: dict[str, Any] = {"nargs": "?"} if word.startswith("[") else {}
            kind: dict[str, Any] = {"type": int} if word == "VERSION" else {}
            action.add_argument(word.strip("[]").lower(), **optional, **kind)
        if name in ("promote", "rollback"):
            action.add_argument("--alias", default="champion", help="which alias (champion)")


def _list(options: argparse.Namespace, console: Console) -> int:
    registry = _registry(options)
    if options.name is None:
        table = Table("model", "versions", "aliases")
        for name in registry.models():
            aliases = ", ".join(f"{alias} → {version}" for alias, version in registry.aliases(name).items())
            table.add_row(name, str(len(registry.list(name))), aliases)
        console.print(table if table.row_count else f"no models in {options.registry}")
        return 0
    table = Table("version", "published", "aliases", "metrics", "trained on")
    for each in registry.list(options.name):
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in each.metrics.items())
        source = f"{each.lineage.get('source_table')} version {each.lineage.get('source_version')}"
        table.add_row(str(each.version), time_text(each.published), ", ".join(each.aliases), metrics, source)
    console.print(table if table.row_count else f"no versions of {options.name} in {options.registry}")
    return 0


def _show(options: argparse.Namespace, console: Console) -> int:
    which = int(options.which) if options.which.isdigit() else options.which
    found = _registry(options).get(options.name, which)
    table = Table.grid(padding=(0, 2))
    for name in ("name", "version", "aliases", "published", "uri", "artifact", "metrics", "parameters", "lineage"):
        table.add_row(f"[bold]{name}[/bold]", str(getattr(found, name)))
    console.print(table)
    return 0


def _history(options: argparse.Namespace, console: Console) -> int:
    table = Table("time", "what", "version", "alias", "before", "why")
    for event in _registry(options).history(options.name):
        before = "" if event.previous is None else str(event.previous)
        table.add_row(time_text(event.time), event.kind, str(event.version), event.alias or "", before, event.reason)
    console.print(table if table.row_count else f"nothing happened to {options.name} in {options.registry}")
    return 0


def _promote(options: argparse.Namespace, console: Console) -> int:
    registry = _registry(options)
    now = registry.aliases(options.name).get(options.alias)
    done = registry.set_alias(
        options.name, options.alias, options.version, expected=now, reason="sparkdl models promote"
    )
    return _moved(options, console, done)


def _rollback(options: argparse.Namespace, console: Console) -> int:
    return _moved(options, console, _registry(options).rollback(options.name, options.alias))


def _moved(options: argparse.Namespace, console: Console, done: Any) -> int:
    verb = f"moved from {done.previous} to {done.version}" if done.moved else f"stays at {done.version}: {done.reason}"
    console.print(f"{options.alias} of {options.name} {verb}")
    return 0


def _registry(options: argparse.Namespace) -> Any:
    from sparkdl.models.registry import ModelRegistry

    return ModelRegistry(options.registry)
