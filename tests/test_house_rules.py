"""The rules of the house, kept by reading the source: who imports whom, how long things may grow, true ``__all__``."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import sparkdl

ROOT = Path(sparkdl.__file__).parent
LEAVES = {"errors", "world", "config"}
BASE = LEAVES | {"storage", "observe", "compat"}

# What a module of a room may import of ours besides its own room and BASE; a room not listed may import nothing more.
ALLOWED = {
    "columns": set(),
    "documents": set(),
    "shards": {"columns", "documents"},
    "collective": set(),
    "launch": set(),
    "tables": set(),
    "batches": {"columns", "shards.manifest"},
    "train": {"batches", "collective.base", "documents"},
    "models": {"columns", "documents", "tables"},
    "scoring": {"columns", "models", "tables"},
    "worker": {"batches", "collective", "train", "models"},
}
DRIVER_SIDE = {"estimator", "runner", "cli", "doctor"}
PYSPARK = {
    "shards.write",
    "launch.driver.barrier",
    "launch.daemon",
    "launch.rank.resources",
    "scoring.score",
    "tables.table",
} | DRIVER_SIDE
TORCH_FREE = {"shards", "launch", "batches.order", "columns"}
MAX_FUNCTION_LINES, MAX_FILE_LINES, MAX_PARAMETERS = 60, 400, 8


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__") or "__init__"] = path
    return found


MODULES = modules()


def room(name: str) -> str:
    return name.split(".")[0]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(path: Path, *, runtime_only: bool = False) -> set[str]:
    """Absolute names that a file imports; ``from a import b`` gives ``a.b`` where that is a module of ours."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if runtime_only and is_type_checking(node):
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively: write the whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole.removeprefix("sparkdl.") in MODULES else str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return names


def ours(path: Path) -> set[str]:
    return {name.removeprefix("sparkdl.") for name in imports(path) if name.startswith("sparkdl.")}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_its_room_may(name):
    imported = ours(MODULES[name])
    here = room(name)
    if here in DRIVER_SIDE or name == "__init__":
        return
    if name in LEAVES:
        assert imported <= {"errors"}, f"{name} is a leaf and may import errors alone"
        return
    if here in BASE - LEAVES:
        assert all(other in LEAVES or room(other) == here for other in imported)
        return
    allowed = ALLOWED.get(here, set())
    for other in imported:
        inside = room(other) == here or room(other) in BASE
        granted = any(other == rule or other.startswith(rule + ".") for rule in allowed)
        assert inside or granted, f"sparkdl/{name} imports {other}: the house allows {sorted(allowed | BASE)}"


@pytest.mark.parametrize("name", MODULES)
def test_foreign_packages_stay_in_their_rooms(name):
    tops = {top.split(".")[0] for top in imports(MODULES[name])}
    if "pyspark" in tops:
        assert name in PYSPARK or room(name) in DRIVER_SIDE, f"{name} imports pyspark: only {sorted(PYSPARK)} may"
    if "horovod" in tops:
        assert name.startswith("collective.horovod"), f"{name} imports horovod: only collective/backends/horovod.py may"
    if "torch" in tops:
        assert not f"{name}.".startswith(tuple(f"{free}." for free in TORCH_FREE)), f"{name} may not import torch"
        assert room(name) not in LEAVES | {"observe", "storage"}


NO_CYCLES_AT_ALL = {"collective"}  # rooms whose imports for types count, too


def test_there_are_no_import_cycles():
    graph = {
        name: {
            other.removeprefix("sparkdl.")
            for other in imports(path, runtime_only=room(name) not in NO_CYCLES_AT_ALL)
            if other.startswith("sparkdl.")
        }
        for name, path in MODULES.items()
    }
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != 1, " -> ".join((*trail, name))
        if state.get(name) == 2 or name not in graph:
            return
        state[name] = 1
        for other in graph[name]:
            visit(other, (*trail, name))
        state[name] = 2

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", MODULES)
def test_nothing_grows_too_big(name):
    source = MODULES[name].read_text()
    assert source.count("\n") <= MAX_FILE_LINES, f"{name} has {source.count(chr(10))} lines: split it by meaning"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            count = len(
                [
                    a
                    for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                    if a.arg not in {"self", "cls"}
                ]
            )
            assert lines <= MAX_FUNCTION_LINES, f"{name}:{node.lineno} {node.name} has {lines} lines"
            assert count <= MAX_PARAMETERS or name.startswith("estimator"), (
                f"{name}:{node.lineno} {node.name} takes {count} parameters"
            )


@pytest.mark.parametrize(
    "name", [module.name for module in pkgutil.walk_packages([str(ROOT)], "sparkdl.")] + ["sparkdl"]
)
def test_every_public_name_exists_and_every_module_says_what_it_is(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), f"{name}.__all__ promises {public}, and it is not there"
