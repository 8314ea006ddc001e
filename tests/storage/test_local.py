"""Folders with well-known names below the one for temporary files, which all users of a machine share."""

import os
import stat

import pytest

from sparkdl.batches.memory.cache import default_folder
from sparkdl.errors import StorageError
from sparkdl.models.folder import work_folder
from sparkdl.storage import Storage
from sparkdl.storage.local import private_folder


def test_a_private_folder_is_made_for_this_user_alone_and_found_again(tmp_path):
    made = private_folder(tmp_path / "mine")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert private_folder(tmp_path / "mine") == made


@pytest.mark.parametrize("how", ["link", "open", "foreign"])
def test_a_folder_that_somebody_else_has_put_there_is_refused(tmp_path, monkeypatch, how):
    name = tmp_path / f"sparkdl-cache-{os.getuid()}"
    if how == "link":  # to a folder that is ours
        (tmp_path / "ours").mkdir()
        name.symlink_to(tmp_path / "ours")
    else:
        name.mkdir()
        name.chmod(0o777 if how == "open" else 0o700)
    if how == "foreign":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(name, 12345, 12345)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("SPARKDL_CACHE", raising=False)
    with pytest.raises(StorageError, match="belongs to somebody else, or others may write there"):
        default_folder()


def test_a_bundle_that_waits_to_be_sent_elsewhere_is_nobody_elses_to_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with work_folder(Storage.of("memory://bucket/model")) as waiting:
        assert waiting.parent == tmp_path
        assert stat.S_IMODE(waiting.stat().st_mode) == 0o700
    with work_folder(Storage.of(str(tmp_path / "models" / "m"))) as local:  # becomes the bundle, by the user's umask
        assert stat.S_IMODE(local.stat().st_mode) & 0o055 == 0o055 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
