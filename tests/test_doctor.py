"""The doctor finds what is there, and says so with an exit code when something needed is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparkdl import doctor
from sparkdl.cli import main
from sparkdl.compat import java_classes


def test_this_machine_has_what_is_needed():
    cheap = [doctor._python(), doctor._java(), doctor._package("torch", None, ""), doctor._horovod(), doctor._shadow()]
    assert [check.name for check in cheap] == ["Python", "Java", "torch", "Horovod", "sparkdl"]
    assert all(check.ok is not False for check in cheap)


def test_support_of_remote_filesystems_is_told_with_the_extra_that_installs_it():
    here, absent = (
        doctor._filesystem("S3", "s3fs", "sparkdl[s3]"),
        doctor._filesystem("X", "no-such-thing", "sparkdl[x]"),
    )
    assert here.ok is True
    assert here.found.startswith("s3fs 20")
    assert (absent.ok, absent.found, absent.remedy) == (None, "not installed", "optional: pip install 'sparkdl[x]'")


def test_missing_java_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    check = doctor._java()
    assert check.ok is False
    assert "apt-get install openjdk-17" in check.remedy


def test_a_java_that_cannot_be_run_is_named_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text("#!/bin/sh\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    check = doctor._java()
    assert (check.ok, check.found) == (False, f"{tmp_path}/bin/java cannot be run (Permission denied)")


def test_a_spark_that_is_too_new_or_too_old_fails():
    check = doctor._package("pyspark", ((1, 0), (1, 1)), "pip install something else")
    assert check.ok is False
    assert "pip install something else" in check.remedy


def test_the_archive_of_java_classes_is_told_with_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    absent = doctor._java_classes()
    assert (absent.ok, absent.found) == (None, "none")
    assert absent.remedy.endswith("python -m sparkdl.compat.java_classes")
    java_classes.archive().parent.mkdir(parents=True)
    java_classes.archive().write_bytes(b"0" * 2048)
    assert (doctor._java_classes().ok, doctor._java_classes().found) == (True, "2.0 KiB")


def test_another_package_of_the_same_name_is_found(tmp_path, monkeypatch):
    (tmp_path / "sparkdl").mkdir()
    (tmp_path / "sparkdl" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = doctor._shadow()
    assert check.ok is False
    assert str(tmp_path / "sparkdl") in check.found


def test_the_exit_code_tells_whether_something_needed_failed(monkeypatch, capsys):
    fine = doctor.Check(name="Java", found="17", ok=True)
    absent = doctor.Check(name="GPUs", found="none", ok=None)
    broken = doctor.Check(name="torch", found="missing", ok=False, remedy="pip install torch")
    monkeypatch.setattr(doctor, "checks", lambda: iter([fine, absent]))
    assert main(["doctor"]) == 0
    monkeypatch.setattr(doctor, "checks", lambda: iter([fine, absent, broken]))
    assert main(["doctor"]) == 1
    assert "1 of 3 checks failed" in capsys.readouterr().out


def test_brackets_of_what_was_found_and_of_the_remedy_are_shown(monkeypatch, capsys):
    broken = doctor.Check(name="X", found="Error: [/x] [y]", ok=False, remedy="pip install 'sparkdl[spark]'")
    monkeypatch.setattr(doctor, "checks", lambda: iter([broken]))
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "Error: [/x] [y]" in shown
    assert "pip install 'sparkdl[spark]'" in shown


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"sparkdl {doctor.own_version()}\n")


@pytest.mark.slow
def test_every_backend_really_all_reduces():
    done = subprocess.run(
        [sys.executable, "-m", "sparkdl.cli", "doctor"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "all-reduce (torch)" in done.stdout
    assert "everything needed works" in done.stdout
