"""A block's variables and working directory, which the block may leave in any state."""

from __future__ import annotations

import os
import tempfile

from sparkdl.compat.environment import environment


def test_what_a_block_does_to_the_environment_is_undone(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKDL_TEST_KEPT", "before")
    monkeypatch.chdir(tmp_path)
    with environment({"SPARKDL_TEST_SET": "inside", "SPARKDL_TEST_KEPT": None}):
        assert os.environ["SPARKDL_TEST_SET"] == "inside"
        assert "SPARKDL_TEST_KEPT" not in os.environ
        os.chdir("/")
    assert "SPARKDL_TEST_SET" not in os.environ
    assert os.environ["SPARKDL_TEST_KEPT"] == "before"
    assert os.getcwd() == str(tmp_path)


def test_a_block_may_end_in_a_directory_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with environment({}), tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    assert os.getcwd() == str(tmp_path)


def test_a_block_may_begin_in_a_directory_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    with environment({"SPARKDL_TEST_SET": "inside"}):
        assert os.environ["SPARKDL_TEST_SET"] == "inside"
    assert "SPARKDL_TEST_SET" not in os.environ
