"""The set-up script refuses in one sentence, with the command that helps, before it downloads or creates anything."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
TOOLS = ["bash", "dirname", "java", "cmake", "g++", "make", "sed", "head", "grep", "touch"]


@pytest.fixture
def machine(tmp_path):
    """A PATH that holds just the named tools, so that any one can be taken away."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def install(machine, tmp_path, **env):
    base_python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}"
    return subprocess.run(
        [machine / "bash", ROOT / "docker" / "install.sh", tmp_path / "venv"],
        env={"PATH": str(machine), "HOME": os.environ["HOME"], "PYTHON": str(base_python), **env},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("tool", "remedy"),
    [
        ("java", "apt-get install openjdk-17-jre-headless"),
        ("cmake", "apt-get install cmake"),
        ("g++", "apt-get install build-essential"),
        ("make", "apt-get install build-essential"),
    ],
)
def test_a_missing_tool_is_named_with_its_remedy_and_nothing_is_made(machine, tmp_path, tool, remedy):
    (machine / tool).unlink()
    done = install(machine, tmp_path)
    assert done.returncode == 1
    assert remedy in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "venv").exists()


def test_a_wrong_python_is_refused(machine, tmp_path):
    fake = tmp_path / "python9"
    fake.write_text("#!/bin/sh\ncase $1 in -V) echo Python 3.9.1 ;; *) exit 1 ;; esac\n")
    fake.chmod(0o755)
    done = install(machine, tmp_path, PYTHON=str(fake))
    assert done.returncode == 1
    assert "Python 3.9.1" in done.stderr


def test_an_old_java_is_refused(machine, tmp_path):
    (machine / "java").unlink()
    (machine / "java").write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    (machine / "java").chmod(0o755)
    done = install(machine, tmp_path)
    assert done.returncode == 1
    assert "Java 11" in done.stderr


def test_the_lock_holds_whatever_its_packages_need():
    """The set-up installs the lock without resolving, so that a name that is missing is missing at run time."""
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lock if "==" in line and not line.startswith("#")}
    missing = [
        f"{name} needs {needed}"
        for name in pinned
        for needed in map(Requirement, importlib.metadata.requires(name) or ())
        if needed.marker is None or needed.marker.evaluate({"extra": ""})
        if canonicalize_name(needed.name) not in pinned
    ]
    assert not missing
