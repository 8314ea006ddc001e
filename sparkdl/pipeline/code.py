"""Which functions a file names, and the code behind one as a hash: edit it, and what it decided is done again.

Nothing is imported, so that a run with nothing to do stays quick.

What counts as the same project: the package that the module belongs to, or, for a module that belongs to none, the
files beside it. Of what is installed (torch, one's own wheels) only the package of the named function counts, whole.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import itertools
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.features.fitted import token_functions
from sparkdl.pipeline.file.problems import Path as FilePath
from sparkdl.pipeline.spec import PipelineSpec, Range
from sparkdl.storage import sha256_hex


def named_functions(spec: PipelineSpec) -> Iterator[tuple[FilePath, str]]:
    """Yield the path and the name of every function that the file names."""
    function = getattr(spec.source, "function", None)
    if function is not None:
        yield ("source", "function"), function
    if spec.transform is not None and spec.transform.function is not None:
        yield ("transform", "function"), spec.transform.function
    yield from saved_functions(spec)
    for name, label in spec.label.items():
        if label.loss is not None and ":" in label.loss:
            yield ("label", name, "loss"), label.loss
    if ":" in spec.train.optimizer:
        yield ("train", "optimizer"), spec.train.optimizer
    searched = spec.search.space.get("train.optimizer", ()) if spec.search is not None else ()
    for position, optimizer in enumerate(() if isinstance(searched, Range) else searched):
        if isinstance(optimizer, str) and ":" in optimizer:
            yield ("search", "space", "train.optimizer", position), optimizer


def saved_functions(spec: PipelineSpec) -> Iterator[tuple[FilePath, str]]:
    """Yield the path and the name of each function that models of the file name, wherever they are loaded."""
    for name, options in spec.features.items():
        for target in token_functions({name: options}):
            yield ("features", name), target
    if spec.model.factory is not None:
        yield ("model", "factory"), spec.model.factory


def code_folder(code: str) -> str | None:
    """The folder of this machine that ``code`` of a file means; None where the file lies in a store.

    Raises:
        ConfigError: there is no such folder.
    """
    if "://" in code and not code.startswith("file://"):
        return None
    folder = Path(code.removeprefix("file://").removeprefix("file:")).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"code={code} is no folder: give the one that the file's modules lie in")
    return str(folder)


@contextmanager
def importable(code: str) -> Iterator[None]:
    """Let modules of the folder ``code`` be imported in the block, before others of the same name, as a script's are.

    They are forgotten afterwards: another pipeline of this process may have modules of the same names, and this one
    may be edited.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = code_folder(code)
    if folder is None:
        yield
        return
    modules_before = set(sys.modules)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)
        for name in set(sys.modules) - modules_before:
            file = getattr(sys.modules[name], "__file__", None)
            # not of an environment or a sparkdl that lies in the folder
            if file is not None and Path(file).is_relative_to(folder) and not _installed(Path(file)):
                del sys.modules[name]


def _installed(file: Path) -> bool:
    """Whether a file is of the standard library, of an installed package or of sparkdl, and nobody's own code."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return True
    return any(file.is_relative_to(folder) for folder in (sysconfig.get_path("stdlib"), Path(__file__).parents[1]))


def split_target(target: str) -> tuple[str, str]:
    """``"package.module:function"`` as its two names.

    Raises:
        ConfigError: it is not of that form.
    """
    module, colon, function = target.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), function]):
        raise ConfigError(f"{target!r} names no function: write package.module:function")
    return module, function


def imported(target: str, what: str) -> Any:
    """The function that ``"package.module:function"`` names; ``what`` is its key in the file, for the message.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, function = split_target(target)
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # importing runs the user's own code
        raise ConfigError(f"{what}={target} cannot be imported: {type(error).__name__}: {error}") from error


def code_hash(target: str) -> str:
    """A hash of the source behind ``module:function``: its module, and what that imports from the same project.

    Of a function that is installed its whole package counts: to follow the imports of torch takes a minute.

    Raises:
        ConfigError: there is no such module, or it has no source.
    """
    module, function = split_target(target)
    source = _source(module)
    if source is None:
        raise ConfigError(
            f"{target} names the module {module}, which is neither in the folder that `code` names nor installed: put "
            "it there, or correct the name"
        )
    _check_bound(_parsed(module, source, source.read_bytes()), target)
    hashes = _hashes_of_package(module, source) if _installed(source) else _hashes_of_imports(module)
    return sha256_hex(json.dumps([function, sorted(hashes.items())]).encode())


def _hashes_of_package(module: str, source: Path) -> dict[str, str]:
    """A hash of each file of the package that a module lies in; of the module's alone where it lies in none."""
    if "." not in module and source.name != "__init__.py":
        return {module: sha256_hex(source.read_bytes())}
    top = _source(module.split(".")[0])
    folder = source.parent if top is None else top.parent  # several packages may share a name that has no source
    return {str(file.relative_to(folder)): sha256_hex(file.read_bytes()) for file in folder.rglob("*.py")}


def _hashes_of_imports(module: str) -> dict[str, str]:
    """A hash of a module and of each that it imports from its own project, by name."""
    hashes: dict[str, str] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        source = None if name in hashes else _source(name)
        if source is None:
            continue
        data = source.read_bytes()
        hashes[name] = sha256_hex(data)
        todo += [dependency for dependency in _imports(name, source, data) if _same_project(dependency, module)]
    return hashes


def arguments_of(target: str) -> dict[str, str | None] | None:
    """What the function or class ``module:function`` can be called with by keyword, with the text of each annotation.

    Returns:
        None where only a call can tell: it takes any, or its source defines it in some other way.

    Raises:
        ConfigError: there is no such module, or it is no Python.
    """
    node = _definition(target)
    is_class = isinstance(node, ast.ClassDef)
    if isinstance(node, ast.ClassDef):
        node = None if node.decorator_list else _last_called("__init__", node.body)
    if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.args.kwarg is not None:
        return None
    by_position = node.args.args
    if is_class and not node.args.posonlyargs:
        by_position = by_position[1:]  # without self, whatever its name is
    return {
        argument.arg: None if argument.annotation is None else ast.unparse(argument.annotation)
        for argument in (*by_position, *node.args.kwonlyargs)
    }


def says_what_it_returns(target: str) -> bool:
    """Whether a function is annotated with what it returns; True of a class, and where only an import can tell.

    Raises:
        ConfigError: there is no such module, or it is no Python.
    """
    node = _definition(target)
    return not isinstance(node, ast.FunctionDef) or bool(node.decorator_list) or node.returns is not None


def unannotated(target: str) -> str:
    """What is wrong with a factory of networks of which that cannot be told."""
    return (
        f"{target} does not say that it returns a module: write `def {split_target(target)[1]}(features, ...) -> "
        "torch.nn.Module`, without which its bundle could not be loaded again"
    )


def _definition(target: str) -> ast.stmt | None:
    """What a module defines under the name of the function, at its top and at last."""
    module, function = split_target(target)
    source = _source(module)
    if source is None:
        raise ConfigError(f"{target} names the module {module}, which is not there")
    return _last_called(function, _parsed(module, source, source.read_bytes()).body)


def _last_called(name: str, body: Iterable[ast.stmt]) -> ast.stmt | None:
    return next((node for node in reversed([*body]) if getattr(node, "name", None) == name), None)


def _source(name: str) -> Path | None:
    """The file of a module, found without an import of the packages that it lies in."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a finder that fails, or a module that was made in memory
        spec = None
    if spec is None:
        return None
    files = [Path(spec.origin or "")]
    if rest:
        paths = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
        files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _parsed(name: str, source: Path, data: bytes) -> ast.Module:
    try:
        return ast.parse(data)
    except SyntaxError as error:
        raise ConfigError(f"{name} ({source}) is no Python: {error.msg} in line {error.lineno}") from error


def _same_project(name: str, module: str) -> bool:
    top, root = name.split(".")[0], module.split(".")[0]
    if "." in module or top == root:
        return top == root
    file, top_file = _source(module), _source(top)
    return file is not None and top_file is not None and file.parent in (top_file.parent, top_file.parent.parent)


def _check_bound(tree: ast.Module, target: str) -> None:
    """Refuse a function that its module plainly does not have: no name anywhere in it is that."""
    module, function = split_target(target)
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.split(".")[0])
    if function in names or {"*", "__getattr__"} & names:  # what these two bring is told by an import alone
        return
    near = difflib.get_close_matches(function, names, n=1)
    meant = f"did you mean {near[0]}?" if near else "correct the name"
    raise ConfigError(f"{target}: the module {module} has no {function!r}: {meant}")


@functools.lru_cache(maxsize=4096)
def _imports(name: str, source: Path, data: bytes) -> tuple[str, ...]:
    """Names that may be modules: ``from a import b`` gives ``a`` and ``a.b``; a package gives its parents, too.

    A file is parsed once as long as it says the same: a run asks twice, and each of hundreds takes some milliseconds.
    """
    package = name if source.name == "__init__.py" else name.rpartition(".")[0]
    names = [package]
    for node in ast.walk(_parsed(name, source, data)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names if base and alias.name != "*")]
    with_parents = (itertools.accumulate(module.split("."), "{}.{}".format) for module in names if module)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(with_parents)))
