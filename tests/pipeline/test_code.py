"""A hash of the code behind a name changes with that code, and with nothing else."""

from __future__ import annotations

import sys

import pytest

from sparkdl.errors import ConfigError
from sparkdl.pipeline.code import code_hash


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A package of three modules, and two modules that belong to none."""
    files = {
        "churn_/__init__.py": "",
        "churn_/model.py": (
            "import json\nfrom churn_ import layers\nfrom . import sizes\ndef build(): ...\ndef other(): ...\n"
        ),
        "churn_/layers.py": "from .inner.deep import x\nfrom .needy import part\n",
        "churn_/needy/__init__.py": "import absent_package_\n",
        "churn_/needy/part.py": "",
        "churn_/sizes.py": "A = 1\n",
        "churn_/inner/__init__.py": "",
        "churn_/inner/deep.py": "x = 1\n",
        "churn_/report.py": "unused = True\n",
        "lone_model_.py": "import lone_helper_\ndef build(): ...\n",
        "lone_helper_.py": "import torch\n",
        "lone_other_.py": "",
        "site-packages/wheel_/__init__.py": "",
        "site-packages/wheel_/model.py": "import wheel_helper_\ndef build(): ...\n",
        "site-packages/wheel_/deep/other.py": "",
        "site-packages/wheel_helper_.py": "import wheel_other_\ndef build(): ...\n",
        "site-packages/wheel_other_.py": "",
        "site-packages/shared_/theirs/build.py": "def build(): ...\n",
        "site-packages/shared_/others/build.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    return tmp_path


@pytest.mark.parametrize(
    ("target", "file", "counts"),
    [
        ("churn_.model:build", "churn_/model.py", True),
        ("churn_.model:build", "churn_/layers.py", True),
        ("churn_.model:build", "churn_/sizes.py", True),
        ("churn_.model:build", "churn_/inner/deep.py", True),
        ("churn_.model:build", "churn_/inner/__init__.py", True),
        ("churn_.model:build", "churn_/__init__.py", True),
        ("churn_.model:build", "churn_/needy/part.py", True),
        ("churn_.model:build", "churn_/report.py", False),
        ("churn_.model:build", "lone_helper_.py", False),
        ("lone_model_:build", "lone_helper_.py", True),
        ("lone_model_:build", "lone_other_.py", False),
        ("wheel_.model:build", "site-packages/wheel_/model.py", True),
        ("wheel_.model:build", "site-packages/wheel_/deep/other.py", True),
        ("wheel_.model:build", "site-packages/wheel_helper_.py", False),
        ("wheel_helper_:build", "site-packages/wheel_helper_.py", True),
        ("wheel_helper_:build", "site-packages/wheel_other_.py", False),
        ("shared_.theirs.build:build", "site-packages/shared_/theirs/build.py", True),
        ("shared_.theirs.build:build", "site-packages/shared_/others/build.py", False),
    ],
)
def test_the_hash_follows_what_is_imported_from_the_same_project(project, target, file, counts):
    before = code_hash(target)
    assert code_hash(target) == before
    with (project / file).open("a") as text:
        text.write("# edited\n")
    assert (code_hash(target) != before) is counts


def test_two_functions_of_a_module_differ(project):
    assert code_hash("churn_.model:build") != code_hash("churn_.model:other")


@pytest.mark.parametrize("target", ["churn_.model:build", "wheel_.model:build", "xml.sax.saxutils:escape"])
def test_nothing_is_imported(project, target):
    before = {*sys.modules} - {name for name in sys.modules if name.startswith("xml.sax")}
    for name in {*sys.modules} - before:
        del sys.modules[name]
    code_hash(target)
    assert {*sys.modules} <= before


def test_what_a_module_lies_in_has_to_be_a_package(project):
    with pytest.raises(ConfigError, match="neither in the folder"):
        code_hash("lone_model_.lone_helper_:build")


@pytest.mark.parametrize("target", ["model", "model:", ":build", "a b:c", "a.:b", "a/b:c"])
def test_what_names_no_function_is_refused(target):
    with pytest.raises(ConfigError, match="names no function"):
        code_hash(target)


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no_such_module_here"):
        code_hash("no_such_module_here:build")


def test_a_file_that_is_no_python_is_refused_by_its_name(project):
    (project / "churn_/model.py").write_text("def build(:\n")
    with pytest.raises(ConfigError, match=r"churn_.model.*line 1"):
        code_hash("churn_.model:build")
