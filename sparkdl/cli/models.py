"""``sparkdl models list | show | compare | history | promote | rollback | lineage | gc | mirror | export``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Column, Table

from sparkdl.cli.lineage_and_gc import collect, collection_arguments, lineage, lineage_arguments
from sparkdl.cli.words import (
    Answer,
    add_command,
    plain_text,
    shown,
    table_of,
    time_text,
    version_named,
    with_exit_codes,
)
from sparkdl.config import require
from sparkdl.models.reference import version_or_alias

if TYPE_CHECKING:
    from sparkdl.models.registry import ModelRegistry, ModelVersion, Promotion

Arguments = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True, kw_only=True)
class _Action:
    """One of the commands."""

    name: str
    run: Callable[[ModelRegistry, argparse.Namespace], Answer]
    text: str
    arguments: Sequence[Arguments] = ()


def add_commands(commands: Any) -> None:
    """Add them to the parser of ``sparkdl``.

    Each prints tables, or one JSON document with ``--json``, in which a number that is not finite is null. Exit codes:
    0 fine, 1 refused, 3 a bundle that cannot be loaded, 4 an error nobody foresaw, 5 the store did not
    answer, 20 not promoted, 30 somebody else was faster, 130 interrupted.
    """
    models = commands.add_parser("models", help="the model registry").add_subparsers(required=True, metavar="ACTION")
    for action in _ACTIONS:
        parser = add_command(models, action.name, with_exit_codes(_command(action)), action.text)
        parser.add_argument("registry", help="address of the registry")
        for add in action.arguments:
            add(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def _command(action: _Action) -> Callable[[argparse.Namespace, Console], int]:
    def run(options: argparse.Namespace, console: Console) -> int:
        from sparkdl.models.registry import ModelRegistry

        answer = action.run(ModelRegistry(options.registry), options)
        if options.json:
            # not print(), which knows nothing of a reader that hangs up, such as head
            console.out(
                json.dumps(_finite(msgspec.to_builtins(answer.value)), indent=1, allow_nan=False), highlight=False
            )
        else:
            console.print(answer.view, soft_wrap=True)
        return answer.code

    return run


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _list(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    if options.name is None:
        models = registry.summaries()
        rows = [
            (
                model.name,
                str(model.versions),
                ", ".join(f"{alias} → {version}" for alias, version in model.aliases.items()),
            )
            for model in models
        ]
        view = table_of(("model", "versions", "aliases"), rows, f"no models in {registry.uri}")
        return Answer(value=models, view=view)
    versions = registry.list(options.name)
    described = [
        (
            str(model.version),
            time_text(model.published),
            ", ".join(model.aliases),
            ", ".join(f"{name} {value:.4g}" for name, value in model.metrics.items()),
            _source(model),
        )
        for model in versions
    ]
    names = ("version", "published", "aliases", "metrics", "trained on")
    return Answer(value=versions, view=table_of(names, described, f"no versions of {options.name} in {registry.uri}"))


def _source(version: ModelVersion) -> str:
    table, number = (version.lineage.get(name) for name in ("source_table", "source_version"))
    return "" if table is None else str(table) if number is None else f"{table} version {number}"


def _show(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    model_version = registry.get(*version_named(options.name, options.which))
    view = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name in ("name", "version", "aliases", "published", "uri", "artifact"):
        value = getattr(model_version, name)
        text = ", ".join(value) if name == "aliases" else time_text(value) if name == "published" else str(value)
        view.add_row(f"[bold]{name}[/bold]", plain_text(text))
    view.add_row(
        "[bold]signed[/bold]", "no" if model_version.signature is None else plain_text(model_version.signature[:40])
    )
    for name in ("metrics", "parameters", "lineage"):
        for number, (key, value) in enumerate(_flat(getattr(model_version, name)).items()):
            view.add_row("" if number else f"[bold]{name}[/bold]", plain_text(f"{key} = {shown(value)}"))
    return Answer(value=model_version, view=view)


def _compare(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    first, second = (registry.get(options.name, version_or_alias(which)) for which in (options.first, options.second))
    rows, value = [], {}
    for part in ("metrics", "parameters", "lineage"):
        facts = [_flat(getattr(version, part)) for version in (first, second)]
        names = sorted(facts[0].keys() | facts[1].keys())
        pairs = {name: [flat.get(name) for flat in facts] for name in names}
        value[part] = pairs
        listed = names if part == "metrics" else [name for name in names if pairs[name][0] != pairs[name][1]]
        rows += [(f"{part}: {name}", *map(shown, pairs[name]), _gain(*pairs[name])) for name in listed]
        if len(names) > len(listed):
            rows.append((f"{part}: {len(names) - len(listed)} more", "alike", "alike", ""))
    titles = [f"version {version.version} {' '.join(version.aliases)}".strip() for version in (first, second)]
    view = table_of((options.name, *titles, "difference"), rows, "neither has metrics, parameters or lineage")
    return Answer(value={"versions": [first.version, second.version], **value}, view=view)


def _gain(first: Any, second: Any) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (first, second))
    return f"{second - first:+.4g}" if numbers and second != first else ""


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {f"{prefix}{name}": value}
        flat |= inner
    return flat


def _history(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    events = registry.history(options.name)
    rows = [
        (time_text(event.time), event.kind, str(event.version), event.alias or "", shown(event.previous), event.reason)
        for event in events
    ]
    names = ("time", "what", "version", "alias", "before", "why")
    return Answer(value=events, view=table_of(names, rows, f"nothing happened to {options.name} in {registry.uri}"))


def _promote(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    name, alias, version = options.name, options.alias, options.version
    if options.if_better is not None:
        require(options.expected is None, "--expected and --if-better are given: keep one, both decide whether to move")
        require(
            options.reason is None, "--reason and --if-better are given: leave --reason out, the comparison is kept"
        )
        promotion = registry.promote_if_better(
            name, alias, version, metric=options.if_better, mode=options.mode or "min",
            min_delta=options.min_delta or 0.0, dry_run=options.dry_run,
        )  # fmt: skip
    else:
        for word, option in (("--mode", options.mode), ("--min-delta", options.min_delta)):
            require(
                option is None, f"{word} {option} has no meaning without --if-better, which names a metric: give both"
            )
        expected = registry.aliases(name).get(alias) if options.expected is None else options.expected
        why = options.reason or "sparkdl models promote"
        promotion = registry.set_alias(name, alias, version, expected=expected, reason=why, dry_run=options.dry_run)
    better = options.if_better is None or promotion.moved or promotion.version == version
    return _moved(registry, options, promotion, 0 if better else 20)


def _rollback(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    return _moved(registry, options, registry.rollback(options.name, options.alias, dry_run=options.dry_run))


def _moved(registry: ModelRegistry, options: argparse.Namespace, done: Promotion, code: int = 0) -> Answer:
    if options.mlflow and done.version is not None and not options.dry_run:
        from sparkdl.interchange.mlflow import mirror_published

        mirror_published(registry, registry.get(options.name, done.version), options.mlflow)
    verb = "would move" if options.dry_run else "moved"
    outcome = f"{verb} from {done.previous} to {done.version}" if done.moved else f"stays at {done.version}"
    why = f": {done.reason}" if done.reason else ""
    value = {"name": options.name, "alias": options.alias, "dry_run": options.dry_run, **msgspec.to_builtins(done)}
    return Answer(value=value, view=plain_text(f"{options.alias} of {options.name} {outcome}{why}"), code=code)


def _mirror(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    from sparkdl.interchange.mlflow import mirror

    mirrored = mirror(
        registry, options.model, options.to,
        name=options.called, experiment=options.experiment, registry_uri=options.registry_uri,
    )  # fmt: skip
    return Answer(value=mirrored, view=plain_text(f"{options.model} is {mirrored}"))


def _export(registry: ModelRegistry, options: argparse.Namespace) -> Answer:
    from sparkdl.interchange.export import export_bundle
    from sparkdl.interchange.mlflow import find_version

    version = None if options.model is None else find_version(registry, options.model)
    exported = export_bundle(
        options.registry if version is None else version.uri, options.to, format=options.format,
        expected_hash=None if version is None else version.artifact, trusted=options.trust,
    )  # fmt: skip
    rows = ", ".join(map(str, exported.rows))
    text = f"{options.to} answers as the bundle does, on {rows} rows, up to {exported.largest_difference:.2g}"
    features = f"; what makes its inputs of {', '.join(exported.columns)} is not in it" if exported.columns else ""
    return Answer(value=exported, view=plain_text(f"{text}{features}; {exported.file}.json says what goes in and out"))


def _name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="of the model")


def _alias(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alias", default="champion", help="which alias (champion)")


def _move(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--mlflow", metavar="URI", help="of MLflow, whose alias follows")


def _optional_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="of a model; by default all are listed")


def _one_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="of the model, or NAME@WHICH")
    parser.add_argument("which", nargs="?", help="a version, or an alias (champion)")


def _two_versions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="a version, or an alias")
    parser.add_argument("second", help="another")


def _promotion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", type=int, help="where the alias shall point")
    parser.add_argument("--reason", help="kept in the history (sparkdl models promote)")
    parser.add_argument("--expected", type=int, help="the version that it points to now; another one is a lost race")
    parser.add_argument("--if-better", metavar="METRIC", help="move only if this metric is better")
    parser.add_argument("--mode", choices=("min", "max"), help="whether less is better, or more (min)")
    parser.add_argument("--min-delta", type=float, help="by how much it must be better (0: at all)")


def _mirrored(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="NAME@ALIAS, NAME@VERSION, or NAME for the newest version")
    parser.add_argument(
        "--to", required=True, metavar="URI", help="MLflow: http://host:5000, sqlite:///file, databricks"
    )
    parser.add_argument("--as", dest="called", metavar="NAME", help="of the model there, such as main.ml.churn")
    parser.add_argument("--experiment", help="that the run belongs to (MLFLOW_EXPERIMENT_NAME, or the model's name)")
    parser.add_argument("--registry-uri", metavar="URI", help="MLflow's registry, if it is elsewhere")


def _exported(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="as mirror takes it; without, the address before it is that of a bundle"
    )
    parser.add_argument("--to", required=True, metavar="FILE", help="to write; FILE.json is written beside it")
    parser.add_argument("--format", required=True, choices=("onnx", "torch"), help="ONNX, or torch.export (.pt2)")
    parser.add_argument(
        "--trust", action="append", default=[], metavar="PACKAGE", help="that may be imported to rebuild the model"
    )


_ACTIONS = (
    _Action(name="list", run=_list, text="models, or the versions of one", arguments=(_optional_name,)),
    _Action(
        name="show",
        run=_show,
        text="one version: metrics, parameters, lineage",
        arguments=(_one_version,),
    ),
    _Action(
        name="compare",
        run=_compare,
        text="two versions side by side, where they differ",
        arguments=(_name, _two_versions),
    ),
    _Action(name="history", run=_history, text="what happened to a model", arguments=(_name,)),
    _Action(
        name="promote",
        run=_promote,
        text="point an alias to a version",
        arguments=(_name, _promotion, _alias, _move),
    ),
    _Action(
        name="rollback",
        run=_rollback,
        text="point an alias back to what it pointed to before",
        arguments=(_name, _alias, _move),
    ),
    _Action(
        name="lineage",
        run=lineage,
        text="from a version to table and files, or from a table or file to versions",
        arguments=(lineage_arguments,),
    ),
    _Action(
        name="gc",
        run=collect,
        text="remove what no version needs; on request versions, never one with an alias",
        arguments=(collection_arguments,),
    ),
    _Action(name="mirror", run=_mirror, text="write a version and its aliases to MLflow", arguments=(_mirrored,)),
    _Action(
        name="export",
        run=_export,
        text="write a version's network as a file that others run",
        arguments=(_exported,),
    ),
)
