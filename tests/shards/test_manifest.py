"""A manifest is read whole or refused, whatever stands in it; its hash finds accidents, not attackers."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pytest

from sparkdl.errors import IntegrityError, SchemaError
from sparkdl.shards.files import write_table_shards
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import xxh3_hex


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_table_shards(pa.table({"a": [1.0, 2.0], "s": ["x", "y"]}), tmp_path_factory.mktemp("set"))


def sealed(body):
    text = json.dumps(body, separators=(",", ":"))
    return json.dumps({"sparkdl_shards": 1, "hash": xxh3_hex(text.encode())})[:-1] + f',"manifest":{text}}}'


def change(manifest, path, value):
    body = json.loads(manifest.to_json())["manifest"]
    *way, last = path
    part = body
    for step in way:
        part = part[step]
    part[last] = value
    return sealed(body)


def test_fills_that_are_no_number_come_back(written):
    text = change(written, ("tensors", 0, "fill"), [float("nan")])
    assert str(Manifest.from_json(text).tensors[0].fill) == "(nan,)"


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("rows",), 3, r"\$.rows, 3 is not the sum"),
        (("rows",), "2", r"\$.rows, Expected `int`"),
        (("color",), 1, "'color' is unknown"),
        (("format",), "csv", r"\$.format"),
        (("seed",), 2**90, r"\$.seed"),
        (("shards",), {}, r"\$.shards"),
        (("shards", 0, "blocks", 0), [-1], r"\$.shards\[0\].blocks\[0\]\[0\], Expected `int` >= 0"),
        (("shards", 0, "blocks", 1), [1 << 30], r"\$.shards\[0\].blocks, its blocks overlap, or end behind"),
        (("shards", 0, "blocks", 2), [1 << 40], r"\$.shards\[0\].blocks, its blocks overlap, or end behind"),
        (("shards", 0, "blocks", 3), ["../../etc"], r"\$.shards\[0\].blocks\[3\]\[0\]"),
        (("shards", 0, "blocks", 0), [1, 1], r"\$.shards\[0\].blocks, its columns have different lengths"),
        (("tensors", 0, "dtype"), "object", r"\$.tensors\[0\].dtype, 'object' is nothing it can be"),
        (("tensors", 0, "shape"), [2**31, 2**31], r"\$.tensors\[0\].shape"),
        (("tensors", 0, "name"), "s", r"\$.tensors\[\d\].name"),
        (("statistics", "a", "count"), 1.5, r"\$.statistics\[...\].count, Expected `int`"),
    ],
)
def test_a_wrong_value_with_a_hash_that_fits_is_named_by_its_field(written, path, value, field):
    with pytest.raises(IntegrityError, match=f"^the manifest of .* cannot be read: in .*{field}.*: write"):
        Manifest.from_json(change(written, path, value))


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "shards/../../outside", "", "a//b", "a\\b", "a\x00b"])
def test_a_shard_lies_inside_its_set(written, path):
    with pytest.raises(IntegrityError, match="is not the plain name of a file below the manifest of"):
        Manifest.from_json(change(written, ("shards", 0, "path"), path))


def test_only_a_plain_file_of_bounded_size_is_read_as_a_manifest(tmp_path):
    file = tmp_path / "manifest.json"
    os.mkfifo(file)
    with pytest.raises(IntegrityError, match="no regular file"):
        Manifest.load(tmp_path)
    file.unlink()
    with file.open("wb") as sink:
        sink.truncate(1 << 40)
    with pytest.raises(IntegrityError, match="at most"):
        Manifest.load(tmp_path)


def test_another_format_or_layout_says_what_reads_it(written):
    with pytest.raises(SchemaError, match="has layout 9, this sparkdl reads"):
        Manifest.from_json(change(written, ("writer_version",), 9))
    with pytest.raises(SchemaError, match="has layout 1, this sparkdl reads 2: write the set again"):
        Manifest.from_json(change(written, ("writer_version",), 1))
    with pytest.raises(SchemaError, match="has format 2, this sparkdl reads 1"):
        Manifest.from_json(written.to_json().replace('"sparkdl_shards":1', '"sparkdl_shards":2'))
