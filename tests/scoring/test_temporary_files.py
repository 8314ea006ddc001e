"""The folder of models that workers score with: how long it stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparkdl.models.bundle import load_bundle, save_bundle
from sparkdl.scoring.temporary_files import keep, process_folder, remove_orphans
from sparkdl.storage import Storage

CHILD = """
import os, signal, sys
from sparkdl.scoring.temporary_files import process_folder
from sparkdl.storage import Storage
folder = process_folder(Storage.of(sys.argv[1])).uri
os.mkdir(folder)
print(folder, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "forked":
    if os.fork() == 0:
        sys.exit()
    os.wait()
if sys.argv[2] != "ended":
    print(os.path.isdir(process_folder(Storage.of(sys.argv[1])).uri), flush=True)
    sys.stdin.read()
"""


def start(root, how):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_the_folder_goes_when_its_process_ends(tmp_path):
    process, folder = start(tmp_path, "ended")
    assert folder.parent == tmp_path
    process.communicate()
    assert not folder.exists()


def test_what_a_killed_process_left_goes_with_the_next_and_what_a_living_one_has_stays(tmp_path):
    killed, orphan = start(tmp_path, "killed")
    killed.communicate()
    living, used = start(tmp_path, "living")
    try:
        assert living.stdout.readline() == "True\n"
        assert not orphan.exists()
        (tmp_path / "somebody-elses").mkdir()
        remove_orphans(Storage.of(tmp_path))
        assert {path.name for path in tmp_path.iterdir()} == {used.name, "somebody-elses"}
    finally:
        living.communicate()
    assert not used.exists()


def test_a_fork_that_ends_takes_nothing_with_it(tmp_path):
    process, folder = start(tmp_path, "forked")
    try:
        assert process.stdout.readline() == "True\n"  # said once the fork has ended
    finally:
        process.communicate()
    assert not folder.exists()


def test_another_process_under_a_dead_ones_number_does_not_keep_its_folder(tmp_path):
    mine = process_folder(Storage.of(tmp_path))
    Path(mine.uri).mkdir()
    head, _, _ = mine.uri.rpartition("-")
    stem, _, started = head.rpartition("-")
    orphan = Path(f"{stem}-{int(started) + 1}-00000000")
    orphan.mkdir()
    remove_orphans(Storage.of(tmp_path))
    assert not orphan.exists()
    assert Path(mine.uri).exists()


def test_the_same_model_lies_there_once_and_another_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torch.manual_seed(0)
    one, two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    root = Storage.of(tmp_path)
    kept = [keep(root, lambda folder, model=model: save_bundle(model, folder)) for model in (one, one, two)]
    uris = [info.uri for info in kept]
    assert uris[0] == uris[1] != uris[2]
    folder = Path(process_folder(Storage.of(tmp_path)).uri)
    assert {str(path) for path in folder.iterdir()} == set(uris)
    assert folder.stat().st_mode & 0o077 == 0
    assert torch.equal(load_bundle(uris[0]).model.weight, one.weight)


def test_nothing_is_left_of_a_model_that_could_not_be_saved(tmp_path):
    def save(folder):
        os.makedirs(folder.uri)
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="full"):
        keep(Storage.of(tmp_path), save)
    assert list(Path(process_folder(Storage.of(tmp_path)).uri).iterdir()) == []


def test_what_a_driver_of_another_machine_has_stays(tmp_path):
    elsewhere = tmp_path / f"sparkdl-models-{'0' * 16}-1-1-00000000"
    elsewhere.mkdir()
    remove_orphans(Storage.of(tmp_path))
    assert elsewhere.exists()
