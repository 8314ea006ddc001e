"""A driver's settings of filesystems, used by another process, shown by none."""

import logging
import pickle

import fsspec.config
import pytest

from sparkdl import run
from sparkdl.errors import RankFailedError
from sparkdl.storage import Configuration, Storage


@pytest.fixture
def keys(monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "driver", "secret": "hidden-secret"})


def test_settings_apply_during_the_block_on_top_of_what_is_there(keys, monkeypatch):
    sent = pickle.dumps(Configuration.here())
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "mine", "anon": False})
    monkeypatch.delitem(fsspec.config.conf, "gcs", raising=False)
    with pickle.loads(sent).applied(), Configuration({"gcs": {"token": "t"}}).applied():
        assert fsspec.config.conf["s3"] == {"key": "driver", "anon": False, "secret": "hidden-secret"}
        assert fsspec.config.conf["gcs"] == {"token": "t"}
    assert fsspec.config.conf["s3"] == {"key": "mine", "anon": False}
    assert "gcs" not in fsspec.config.conf


def test_no_repr_shows_them(keys):
    for shown in (Configuration.here(), Storage.of("s3://b/a"), Storage.of("s3://b/a").child("c")):
        assert "hidden-secret" not in f"{shown!r} {shown}"


def _secret():
    import fsspec.config

    from sparkdl.storage import Storage

    return fsspec.config.conf["s3"]["secret"], Storage.of("s3://b/a").options["key"]


def _fails():
    raise OSError("no")


def test_ranks_use_the_drivers_settings_and_no_log_or_error_shows_them(keys, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        assert run(_secret, num_proc=-1) == [("hidden-secret", "driver")]
        with pytest.raises(RankFailedError) as caught:
            run(_fails, num_proc=-1)
    printed = capfd.readouterr()
    assert "hidden-secret" not in f"{caught.value!r} {caught.value} {printed.out} {printed.err} {caplog.text}"
