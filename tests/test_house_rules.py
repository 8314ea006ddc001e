"""The rules of the house, kept by reading the source: who imports whom, how long things may grow, true ``__all__``."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

import pytest

import sparkdl
from sparkdl.pipeline.spec import SourceSection

ROOT = Path(sparkdl.__file__).parent
LEAVES = {"errors", "world", "config", "processes"}
BASE = LEAVES | {"storage", "observe", "compat"}

# What a module of a room may import of ours besides its own room and BASE; a room not listed may import nothing more.
ALLOWED = {
    "columns": set(),
    "documents": set(),
    "metrics": set(),
    "features": {"columns", "documents"},
    "shards": {"columns", "documents"},
    "nn": set(),
    "collective": {"launch.store", "launch.wire", "nn"},
    "launch": set(),
    "tables": {"columns.frames", "columns.names", "columns.numpy_arrow"},
    "batches": {"columns", "shards.manifest"},
    "strategies": {"collective", "nn", "launch.addresses", "launch.store", "launch.wire"},
    "train": {"batches", "collective.base", "documents", "metrics", "nn", "strategies.base"},
    "models": {"columns", "documents", "features", "nn", "tables"},
    "scoring": {"columns", "features", "models", "nn", "tables"},
    "interchange": {
        *("columns", "documents", "features", "models", "scoring"),
        *("estimator.outputs", "estimator.summary"),  # which know no Spark
    },
    "spread_model": {"batches", "collective", "strategies", "train"},
    "worker": {"batches", "collective", "launch.rank.process_memory", "strategies", "train", "models"},
    "pipeline.spec": {"features", "estimator.params.spec", "metrics.names"},
    "pipeline.file": {"features", "columns", "pipeline.spec"},
    "pipeline.schema": {"pipeline.spec", "pipeline.file"},
}
DRIVER_SIDE = {"estimator", "runner", "pipeline", "cli", "doctor"}
PURE = {name for name in ALLOWED if name.startswith("pipeline.")}  # a pipeline is checked without Spark and torch
PYSPARK = {
    "columns.frames",
    "shards.write",
    "launch.driver.barrier",
    "launch.driver.slots",
    "launch.daemon",
    "launch.rank.resources",
    "scoring.score",
    "scoring.score_table",
    "scoring.transport",
    "tables.delta_rs",
    "tables.engine",
    "tables.reading",
    "tables.spark_delta",
    "tables.table",
} | DRIVER_SIDE
TORCH_FREE = {"shards", "launch", "batches.order", "columns", "features", "metrics"} | {
    f"pipeline.{part}" for part in ("file", "judging", "rows", "schema", "sources", "spec", "state", "windows")
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__") or "__init__"] = path
    return found


MODULES = modules()


def for_each(names: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Make one test of a rule, which holds for each of ``names`` or tells all for which it does not."""

    def decorate(rule: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for name in names:
                try:
                    rule(name)
                except AssertionError as error:
                    broken.append(f"{name}: {error}")
            assert not broken, "\n".join(broken)

        return test

    return decorate


def room(name: str) -> str:
    return next((part for part in PURE if f"{name}.".startswith(f"{part}.")), name.split(".")[0])


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> set[str]:
    """Absolute names that a file imports; ``from a import b`` gives ``a.b`` where that is a module of ours."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively: write the whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                known = (
                    whole.removeprefix("sparkdl.") in MODULES
                    or (ROOT.parent / f"{whole.replace('.', '/')}.py").exists()
                )
                names.add(whole if known else str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree(path))
    return names


def ours(path: Path) -> set[str]:
    return {name.removeprefix("sparkdl.") for name in imports(path) if name.startswith("sparkdl.")}


@for_each(MODULES)
def test_a_module_imports_only_what_its_room_may(name):
    imported = ours(MODULES[name])
    here = room(name)
    if here in DRIVER_SIDE or name == "__init__":
        return
    if name in LEAVES:
        assert imported <= {"errors"}, f"{name} is a leaf and may import errors alone"
        return
    if here in BASE - LEAVES:
        below = {here, "compat"} if here == "storage" else {here}  # storage reads what Spark says of stores and workers
        assert all(other in LEAVES or room(other) in below for other in imported)
        return
    allowed = ALLOWED.get(here, set())
    for other in imported:
        inside = room(other) == here or room(other) in BASE
        granted = any(other == rule or other.startswith(rule + ".") for rule in allowed)
        assert inside or granted, f"sparkdl/{name} imports {other}: the house allows {sorted(allowed | BASE)}"


@for_each(MODULES)
def test_foreign_packages_stay_in_their_rooms(name):
    tops = {top.split(".")[0] for top in imports(MODULES[name])}
    if "pyspark" in tops:
        assert name in PYSPARK or room(name) in PYSPARK, f"{name} imports pyspark: only {sorted(PYSPARK)} may"
    if "horovod" in tops:
        assert name == "collective.backends.horovod", f"{name} imports horovod: collective/backends/horovod.py may"
    if "torch" in tops:
        assert not f"{name}.".startswith(tuple(f"{free}." for free in TORCH_FREE)), f"{name} may not import torch"
        assert room(name) not in LEAVES | {"observe", "storage"}


NO_CYCLES_AT_ALL = {"collective"}  # rooms whose imports for types count, too


def graph_of(files: dict[str, Path]) -> dict[str, set[str]]:
    """Who imports whom, by whole names; imports under TYPE_CHECKING count."""
    return {
        name: {other for other in imports(path) if other in files and other != name} for name, path in files.items()
    }


def cycle_in(graph: dict[str, set[str]]) -> str:
    """One import cycle, written out; empty if there is none."""
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> str:
        if state.get(name) == 1:
            return " -> ".join((*trail[trail.index(name) :], name))
        if state.get(name) == 2:
            return ""
        state[name] = 1
        found = next(filter(None, (visit(other, (*trail, name)) for other in sorted(graph.get(name, ())))), "")
        state[name] = 2
        return found

    return next(filter(None, (visit(name, ()) for name in sorted(graph))), "")


JOBS = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
    for path in sorted((ROOT.parent / "jobs").rglob("*.py"))
}
EVERYTHING = {f"sparkdl.{name}" if name != "__init__" else "sparkdl": path for name, path in MODULES.items()} | JOBS


def test_there_are_no_import_cycles():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == "b -> c -> b"
    assert not cycle_in(graph_of(EVERYTHING))


@pytest.mark.parametrize("large", sorted({room(name) for name in MODULES if "." in name}))
def test_the_inner_rooms_of_a_room_import_one_way(large):
    """A folder inside of a room counts as one: what it holds may not be half above and half below its neighbours."""

    def place(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[:3]) if len(parts) > 3 or EVERYTHING[name].name == "__init__.py" else name

    inner: dict[str, set[str]] = {}
    for name, others in graph_of(EVERYTHING).items():
        if name.startswith(f"sparkdl.{large}."):
            inner.setdefault(place(name), set()).update(place(other) for other in others if place(other) != place(name))
    assert not cycle_in(inner)


PIPELINE_ORDER = (
    *("spec", "windows", "file", "code", "schema", "trials", "recipe", "session"),
    *("sources", "rows", "judging", "state", "work", "steps"),
    *("init", "analysis", "check", "notify", "report", "run"),
    *("amounts", "plan", "status", "summary", "pipeline", "__init__"),
)
"""The parts of ``pipeline/``; each may import those before it."""


@for_each([name for name in MODULES if room(name).split(".")[0] == "pipeline"])
def test_parts_of_the_pipeline_import_those_before_them(name):
    inside = [name, *(other for other in ours(MODULES[name]) if room(other).split(".")[0] == "pipeline")]
    here, *others = ([*whole.split("."), "__init__"][1] for whole in inside)
    above = {other for other in others if PIPELINE_ORDER.index(other) > PIPELINE_ORDER.index(here)}
    assert not above, f"it imports {sorted(above)}, which come after {here}"


@for_each([name for name in MODULES if not name.startswith("pipeline.sources")])
def test_kinds_of_sources_are_told_apart_in_their_room_alone(name):
    for node in ast.walk(tree(MODULES[name])):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            kinds = [kind.__name__ for kind in get_args(SourceSection) if kind.__name__ in ast.unparse(node)]
            assert not kinds, (
                f"line {node.lineno} asks for {kinds[0]}: ask the Source, see sparkdl/pipeline/sources/base.py"
            )


HIDDEN_FROM_JOBS = {"batches", "collective", "compat", "launch"}


@for_each(JOBS)
def test_jobs_import_public_rooms_only(name):
    hidden = {other for other in imports(JOBS[name]) if other.startswith("sparkdl.")}
    assert not {other for other in hidden if room(other.removeprefix("sparkdl.")) in HIDDEN_FROM_JOBS}


@for_each([module.name for module in pkgutil.walk_packages([str(ROOT)], "sparkdl.")] + ["sparkdl"])
def test_every_public_name_exists_and_every_module_says_what_it_is(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), f"{name}.__all__ promises {public}, and it is not there"


UNPICKLERS = {
    "collective.signed",  # between ranks: signed with the key of the run, for its place and order
    "documents.payload",  # over the channel: each frame signed with the secret of the run
    "estimator.saving.artifacts",  # a saved stage: signed by nobody, for a reader who allows pickles by word
    "interchange.export",  # the file that it has written itself a moment ago, to compare its answers
    "launch.local",  # signed by nobody: through the pipe from the very process that started this one
    "launch.wire",  # each frame signed with the secret of the run
    "models.recipe",  # a bundle: signed by nobody, for a reader who allows pickles by word
    "scoring.models",  # part of Spark's own task, as authentic as the code of the task beside it
}
RUNS_CODE = re.compile(
    r"\b(pickle|torch|torch\.export|joblib|marshal|dill)\.(loads?|Unpickler)\b|^(eval|exec|compile)$|^yaml\.load$"
)


def calls(path):
    """The called names of a module, and the base classes, as they are written."""
    nodes = list(ast.walk(tree(path)))
    used = [node.func for node in nodes if isinstance(node, ast.Call)]
    used += [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    return {ast.unparse(part).replace("cloudpickle", "pickle") for part in used}


def test_data_becomes_code_in_a_few_places_only():
    found = {name for name, path in (MODULES | JOBS).items() if any(map(RUNS_CODE.search, calls(path)))}
    assert found == UNPICKLERS
