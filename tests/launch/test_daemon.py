"""What the worker daemon loads before it forks."""

from __future__ import annotations

import sys

from sparkdl.launch.daemon import DEFAULT_PRELOAD, preload


def test_what_is_installed_is_loaded_and_the_rest_is_passed_over(capsys):
    loaded = preload()
    assert "sparkdl.launch.rank.rank" in loaded
    assert set(loaded) <= set(DEFAULT_PRELOAD)
    assert all(name in sys.modules for name in loaded)
    assert "cannot be imported" not in capsys.readouterr().err


def test_a_module_named_by_the_user_that_is_not_there_is_reported(capsys):
    assert preload("json, no_such_module") == ["json"]
    assert "SPARKDL_PRELOAD names no_such_module, which cannot be imported" in capsys.readouterr().err


def test_a_module_that_starts_threads_is_reported(capsys, tmp_path, monkeypatch):
    (tmp_path / "starts_threads.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, args=(3,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    preload("starts_threads")
    assert "starts_threads starts threads when imported" in capsys.readouterr().err
