"""Copies of bundles: whole, or made again; what one registry holds spoils no other's model."""

from __future__ import annotations

import os
import resource
import tempfile
import time
import uuid

import pytest
import torch
from torch import nn

from sparkdl.errors import BundleError, IntegrityError, StorageError
from sparkdl.models.bundle import load_bundle, save_bundle
from sparkdl.models.copies import copy_bundle
from sparkdl.models.folder import read_bundle
from sparkdl.storage import Storage


@pytest.fixture
def remote():
    """An address where nothing is, of a store without folders."""
    return f"memory://{uuid.uuid4().hex}/bundle"


@pytest.fixture
def info(tmp_path):
    return save_bundle(nn.Linear(2, 1), str(tmp_path / "bundle"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"sparkdl-{os.getuid()}" / "bundles"


def altered(file):
    """Change a file's last byte."""
    good = file.read_bytes()
    file.write_atomic(good[:-1] + bytes([good[-1] ^ 1]))


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": 99}'])
def test_a_damaged_document_is_replaced_on_a_store_without_folders(info, remote, cache, damage):
    target = Storage.of(remote)
    copy_bundle(info, target)
    target.child("bundle.json").write_atomic(damage)
    copy_bundle(info, target)
    assert read_bundle(remote).content_hash == info.content_hash
    assert torch.equal(load_bundle(remote).model.weight, load_bundle(info.folder).model.weight)


def test_a_file_that_differs_from_its_hash_is_not_kept_under_the_bundles(info, remote, cache):
    target = Storage.of(remote)
    copy_bundle(info, target)
    altered(target.child("weights.safetensors"))
    with pytest.raises(IntegrityError, match=r"^memory:.*weights.safetensors has the hash"):
        load_bundle(remote)
    assert list(cache.iterdir()) == []
    copy_bundle(info, target)  # what the message says to do
    assert load_bundle(remote).info.content_hash == info.content_hash


def test_a_copy_that_was_damaged_on_this_machine_is_made_again(info, remote, cache):
    copy_bundle(info, remote)
    load_bundle(remote)
    altered(Storage.of(cache / info.content_hash / "weights.safetensors"))
    assert load_bundle(remote).info.content_hash == info.content_hash
    assert [place.name for place in cache.iterdir()] == [info.content_hash]
    (cache / info.content_hash / "weights.safetensors").unlink()
    load_bundle(remote)


def test_copies_that_nobody_has_used_for_long_go_with_the_next_one(info, remote, cache):
    copy_bundle(info, remote)
    load_bundle(remote)
    old, left = cache / ("a" * 64), cache / "tmp-of-a-killed-process"
    for place in (old, left, cache / info.content_hash):
        place.mkdir(exist_ok=True)
        (place / "file").write_bytes(b"")
        os.utime(place, (time.time() - 31 * 86400,) * 2)
    load_bundle(remote)
    assert len(list(cache.iterdir())) == 3  # nothing was copied
    other = save_bundle(nn.Linear(3, 1), f"{remote}-2")
    load_bundle(f"{remote}-2")
    assert {place.name for place in cache.iterdir()} == {info.content_hash, other.content_hash}


@pytest.fixture
def full_disk():
    """As one does that is full: no file of this process becomes larger than 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_becomes_full_is_named_as_that_and_nothing_half_written_stays(tmp_path, full_disk):
    with pytest.raises(BundleError, match=r"the weights cannot be written to .*; free space"):
        save_bundle(nn.Linear(400, 200), str(tmp_path / "bundle"))
    assert list(tmp_path.iterdir()) == []
    full_disk()
    info = save_bundle(nn.Linear(400, 200), str(tmp_path / "bundle"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(StorageError, match=r"cannot write .*copies.*free space"):
        copy_bundle(info, str(tmp_path / "copies" / "one"))
    assert list((tmp_path / "copies").iterdir()) == []
