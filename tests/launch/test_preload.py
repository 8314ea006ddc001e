"""Which modules a function seems to need."""

from __future__ import annotations

import sys

import cloudpickle

from sparkdl.launch.preload import likely


def pickled(function):
    return memoryview(cloudpickle.dumps(function))


NAMES = ("torch", "torch.distributed", "horovod.torch")


def test_what_a_function_names_is_likely_and_nothing_else():
    def with_torch():
        import torch.distributed as dist

        return dist

    def with_horovod():
        import horovod.torch as hvd

        return hvd

    assert likely(NAMES, pickled(lambda: 1)) == ()
    assert likely(NAMES, pickled(with_torch)) == ("torch", "torch.distributed")
    assert likely(NAMES, pickled(with_horovod)) == NAMES
    assert likely(NAMES, memoryview(bytes(2 << 20))) == NAMES, "too large to look at"


def test_a_module_whose_import_is_forbidden_is_not_looked_into(monkeypatch):
    monkeypatch.setitem(sys.modules, "forbidden", None)
    assert likely(NAMES, pickled(lambda: "forbidden")) == ()


def test_what_the_home_of_a_function_has_loaded_is_likely(tmp_path, monkeypatch):
    (tmp_path / "late_home.py").write_text("from math import floor\nfrom decimal import Decimal\ndef f(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import late_home

    assert likely(("decimal", "fractions"), pickled(late_home.f)) == ("decimal",)
    del sys.modules["late_home"]
