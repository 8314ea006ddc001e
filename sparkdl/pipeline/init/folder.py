"""The folder of a new pipeline: its file, a model stub, a test, a schedule, and a page that says what to do."""

from __future__ import annotations

import importlib.util
import re
import shlex
from importlib import resources
from pathlib import Path
from string import Template

from sparkdl.errors import ConfigError, ConflictError
from sparkdl.storage import Storage

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PLAIN_NETWORK = ("class TabularNet(", "class _Block(")
"""How what the ensemble does not need begins in the module of networks."""


def new_folder(place: str) -> tuple[Storage, str]:
    """The folder that ``place`` names, and the pipeline's name, which is the last part of it.

    Raises:
        ConfigError: it cannot be a pipeline's name, there is something at that place, or it is on no disk here.
    """
    folder = Storage.of(place if "://" in place else Path(place).expanduser())
    if folder.local_path() is None:
        raise ConfigError(f"{place} is no folder of this machine, where init writes: name one, and copy it from there")
    name = folder.uri.rpartition("/")[2]
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a pipeline: use letters, digits, - and _, such as churn")
    if folder.exists():
        raise ConfigError(f"{folder.uri} is there already, and init overwrites nothing: choose another name")
    return folder, name


def module_of(name: str) -> str:
    """The Python module of the model stub."""
    plain = re.sub(r"\W", "_", name).lower()
    return f"{plain if plain[0].isalpha() else f'p_{plain}'}_model"


def write_folder(folder: Storage, name: str, text: str, *, with_model: bool = False) -> list[str]:
    """Write all files, and the folder appears with them; return their names.

    Args:
        folder: to write to.
        name: of the pipeline.
        text: of its file.
        with_model: whether the module beside it is sparkdl's own network, in full, in place of a short one.
    """
    module = module_of(name)
    words = {
        "name": name,
        "module": module,
        "test": f"test_{module}.py",
        "schedule": f"{name}.cron",
        "what": "the network, sparkdl's own written out: the pipeline uses this one"
        if with_model
        else "a network of your own to begin with; the pipeline uses sparkdl's until you name it",
        "folder": shlex.quote(str(folder.local_path())).replace("%", r"\%"),
        "source": _own_network() if with_model else "",
    }
    templates = {
        f"{module}.py": "own_network.py.txt" if with_model else "network.py.txt",
        words["test"]: "test_network.py.txt",
        words["schedule"]: "schedule.cron.txt",
        "README.md": "README.md.txt",
    }
    files, folder_of_templates = {f"{name}.yaml": text}, resources.files(__package__) / "templates"
    for file, template in templates.items():
        files[file] = Template((folder_of_templates / template).read_text(encoding="utf-8")).substitute(words)
    try:
        for file, content in files.items():
            folder.child(file).write_if_absent(content.encode())
    except ConflictError:  # somebody else is writing there at this moment
        raise
    except BaseException:
        folder.delete(recursive=True)
        raise
    return list(files)


def _own_network() -> str:
    """The source of sparkdl's own network and its parts; torch is not imported for it."""
    module = importlib.util.find_spec("sparkdl.models.networks")
    assert module is not None
    assert module.origin is not None
    source = Path(module.origin).read_text(encoding="utf-8")
    definitions = source.partition("\n__all__ = ")[2].partition("\n\n")[2].rstrip("\n").split("\n\n\n")
    return "\n\n\n".join(text for text in definitions if not text.startswith(_PLAIN_NETWORK))
