"""Documents that somebody has changed at will, with hashes that fit, end in a typed error or are read; nothing else.

What is bounded besides is memory: a small document must not make its reader take much of it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import resource
from datetime import UTC, datetime

import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl.config import CheckpointConfig
from sparkdl.documents.typed import Source, convert, encode, parse
from sparkdl.errors import IntegrityError, SparkdlError
from sparkdl.estimator.saving.artifacts import Saved, load_named, save_named
from sparkdl.features.fitted import Features, fit
from sparkdl.features.spec import Category, DateParts, Ids, Number, Text, Vector
from sparkdl.features.statistics import statistics_of
from sparkdl.models.bundle import Signature, TensorField, load_bundle, save_bundle
from sparkdl.models.folder import content_hash_of
from sparkdl.models.registry import ModelRegistry
from sparkdl.models.registry.events import SIGNED_EVENTS, Event, State
from sparkdl.observe import logger
from sparkdl.shards.files import write_table_shards
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import Storage, xxh3_hex
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.resume import check_start

NASTY = [
    *(None, True, False, -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**64, 2**200, -(2**70), 1.5, 1e308, -0.0),
    *("", "x", "../x", "/etc/passwd", "a\x00b", "a\\b", "\ud800", "x" * 5000, "os:system", "torch.hub:load"),
    *("sparkdl.models.importing:build", "$tensor", "NaN", "bytes", "sha256", "same_as", "Linear", "LSTM"),
    *(
        [],
        {},
        [[]],
        [None],
        {"": None},
        [0] * 1000,
        {"$tensor": "w"},
        {"$map": [[{}, 1]]},
        {"!": "name", "path": "a:b"},
    ),
    *({"class": "Linear", "arguments": {"in_features": 2**40, "out_features": 2**40}}, {"same_as": ""}),
    *({"class": "LSTM", "arguments": {"input_size": 1, "hidden_size": 1, "num_layers": 10**9}},),
    *({"class": "Sequential", "children": [["0", {"same_as": ""}]]},),
]


NASTY_BYTES = [b"NaN", b"1e999", b'"', b"[" * 200, b"9" * 5000, b"\xff", b"{}", b","]


def places(value, found=None, way=()):
    """Every place of a document, as ways from its root."""
    found = [] if found is None else found
    found.append(way)
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        places(part, found, (*way, key))
    return found


def at(value, way):
    for key in way:
        value = value[key]
    return value


def mutated(document, chance):
    """A copy with one to three changes: values, names, whole branches from elsewhere in it."""
    document = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        ways = [way for way in places(document) if way]
        if not ways:
            return document
        *above, last = chance.choice(ways)
        parent, how = at(document, above), chance.randrange(7)
        if how == 0:
            del parent[last]
        elif how == 1 and isinstance(parent, dict):
            parent[chance.choice(["color", "", "__class__", "x" * 300, "\u202e"])] = copy.deepcopy(chance.choice(NASTY))
        elif how == 2 and isinstance(parent, dict):
            name = str(chance.choice(list(parent)))
            parent[name] = parent.pop(last)
        elif how == 3:
            parent[last] = copy.deepcopy(at(document, chance.choice(ways)))
        elif how == 4 and isinstance(parent[last], int):
            parent[last] += chance.choice((-1, 1, 2**16, 2**40))
        elif how == 5:
            inner = parent[last]
            for _ in range(chance.choice((1, 30, 90, 120))):
                inner = [inner]
            parent[last] = inner
        else:
            parent[last] = copy.deepcopy(chance.choice(NASTY))
    return document


def text_of(document, chance):
    """The document as bytes, some of them changed in one text of seven."""
    text = bytearray(json.dumps(document, separators=(",", ":")).encode())
    if chance.randrange(7) == 0:
        for _ in range(chance.choice((1, 3))):
            place = chance.randrange(len(text) or 1)
            kind = chance.randrange(3)
            if kind == 0 and text:
                text[place] = chance.randrange(256)
            elif kind == 1:
                del text[place : place + chance.randrange(1, 20)]
            else:
                text[place:place] = chance.choice(
                    [b"NaN", b"1e999", b'"', b"[" * 200, b"9" * 5000, b"\xff", b"{}", b","]
                )
    return bytes(text)


def flipped(data, chance):
    """The bytes with some of the first ones changed: those that say what the others are."""
    data = bytearray(data)
    for _ in range(chance.choice((1, 2, 4))):
        data[chance.randrange(min(len(data), 400))] = chance.choice((0, 1, 32, 34, 48, 57, 91, 93, 123, 125, 255))
    return bytes(data[: chance.choice((len(data), len(data), len(data) - 1, 7))])


def manifests(folder):
    table = pa.table({"a": [1.0, 2.0, None], "s": ["x", "y", "x"], "v": [[1, 2], [3], []]})
    from sparkdl.columns.layout import Layout

    whole = json.loads(write_table_shards(table, folder, layout=Layout(nulls="mask")).to_json())["manifest"]

    def read(chance):
        text = text_of(mutated(whole, chance), chance)
        head = json.dumps({"sparkdl_shards": 1, "hash": xxh3_hex(text)})[:-1].encode()
        Manifest.from_json(head + b',"manifest":' + text + b"}")

    return read


def saved_checkpoint(folder):
    keeper = Checkpointer(CheckpointConfig(uri=str(folder)))
    model = nn.Linear(3, 2)
    state = {
        "model": model.state_dict(),
        "rng": [b"\x01", (1, 2.5, float("nan"))],
        "by": {0: torch.ones(2)},
        "w": 2**90,
        "facts": {"identity": {"seed": "0"}, "epochs": 1, "shapes": {"weight": [2, 3]}},
    }
    keeper.save(state, step=1, epoch=0)
    keeper.close()
    return keeper, json.loads((folder / "step-0000000001.json").read_text())["checkpoint"]


def put_checkpoint(folder, text):
    (folder / "step-0000000001.json").write_bytes(b'{"checkpoint":%s,"xxh3":"%s"}' % (text, xxh3_hex(text).encode()))


def checkpoints(folder):
    keeper, body = saved_checkpoint(folder)

    def read(chance):
        put_checkpoint(folder, text_of(mutated(body, chance), chance))
        check_start(keeper, nn.Linear(3, 2), 1)
        keeper.load(1)

    return read


def checkpoint_tensors(folder):
    keeper, body = saved_checkpoint(folder)
    whole = (folder / body["tensors"]).read_bytes()

    def read(chance):
        data = flipped(whole, chance)
        (folder / body["tensors"]).write_bytes(data)
        put_checkpoint(folder, json.dumps(body | {"bytes": len(data), "xxh3": xxh3_hex(data)}).encode())
        keeper.load(1)

    return read


def saved_bundle(folder, model=None):
    signature = Signature(
        inputs=(TensorField(name="x", shape=(4,), columns=("a", "b", "c", "d")),), outputs=(TensorField(name="y"),)
    )
    layer = nn.Linear(4, 4)
    model = model or nn.Sequential(layer, nn.ReLU(), layer, nn.LSTM(4, 2))
    save_bundle(model, str(folder / "b"), signature=signature, preprocessing={"mean": [1.5]})
    return json.loads((folder / "b" / "bundle.json").read_text())


def bundles(folder):
    document = saved_bundle(folder)

    def read(chance):
        changed = mutated(document, chance)
        if isinstance(changed, dict):
            changed["content_hash"] = content_hash_of(changed)
        (folder / "b" / "bundle.json").write_bytes(text_of(changed, chance))
        load_bundle(str(folder / "b"))

    return read


def bundle_weights(folder):
    document = saved_bundle(folder, nn.Linear(4, 4))  # small, as it is made for each file before that is compared
    file = folder / "b" / "weights.safetensors"
    whole = file.read_bytes()

    def read(chance):
        data = flipped(whole, chance)
        file.write_bytes(data)
        facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        changed = document | {"files": {file.name: facts}}
        changed["content_hash"] = content_hash_of(changed)
        (folder / "b" / "bundle.json").write_text(json.dumps(changed))
        load_bundle(str(folder / "b"))

    return read


def events(folder):
    now, artifact = datetime.now(UTC), "a" * 64
    rows = [
        Event(
            kind="published", name="m", version=n, artifact=artifact, metrics={"mae": float("nan")}, publication=str(n)
        )
        for n in (1, 2, 3)
    ]
    rows += [Event(kind="aliased", name="m", alias="champion", version=n, previous=n - 1) for n in (1, 2)]
    rows += [
        Event(kind="rolled_back", name="m", alias="champion", version=1),
        Event(kind="deleted", name="m", version=2),
    ]
    rows = [event.stamped(position, now).to_row() for position, event in enumerate(rows)]

    def read(chance):
        found = mutated(rows, chance)
        for row in found:
            for name in ("metrics", "parameters", "lineage"):
                if isinstance(row, dict) and isinstance(row.get(name), str) and not chance.randrange(3):
                    row[name] = text_of({"mae": copy.deepcopy(chance.choice(NASTY))}, chance).decode(
                        errors="surrogateescape"
                    )
        try:
            table = pa.Table.from_pylist([row for row in found if isinstance(row, dict)], schema=SIGNED_EVENTS)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise IntegrityError("no table holds it") from error
        state = State(table, str)
        for name in state.names():
            state.versions(name)
            for alias in state.aliases(name):
                state.get(name, alias)

    return read


def registry_checkpoints(folder):
    saved_bundle(folder, nn.Linear(2, 1))
    registry = ModelRegistry(str(folder / "registry"))
    for n in range(3):
        registry.publish("m", str(folder / "b"), publication=str(n))
    registry.set_alias("m", "champion", 2, expected=None)
    registry._log.checkpoint()
    file = folder / "registry" / "state" / "checkpoint"
    data = file.read_bytes().partition(b"\n")[2]

    def read(chance):
        other = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            other[chance.randrange(len(other))] = chance.randrange(256)
        other = bytes(other[: chance.choice([len(other), chance.randrange(len(other))])])
        file.write_bytes(hashlib.sha256(other).hexdigest().encode() + b"\n" + other)
        opened = ModelRegistry(registry.uri)
        opened.models()
        opened.get("m", "champion")
        if opened._log._read_checkpoint() is None:
            assert [version.version for version in opened.list("m")] == [1, 2, 3]
            raise IntegrityError("it is not believed")

    return read


def objects(folder):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    values = {
        "optimizer": optimizer,
        "loss": nn.CrossEntropyLoss(weight=torch.ones(2)),
        "metrics": {"mae": nn.L1Loss()},
    }
    values |= {"history": [{"loss": 0.5, "epoch": (1, 2)}], "function": nn.functional.mse_loss, "dtype": torch.float16}
    place = Storage.of(folder)
    section = save_named(values, place, {id(tensor): name for name, tensor in model.named_parameters()})
    plain = json.loads((folder / "objects.json").read_text())

    def read(chance):
        data = text_of(mutated(plain, chance), chance)
        (folder / "objects.json").write_bytes(data)
        section["files"]["objects.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        load_named(place, convert(section, Saved, Source("metadata")), dict(model.named_parameters()), allowed=False)

    return read


def object_tensors(folder):
    place = Storage.of(folder)
    section = save_named({"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)}, place)
    whole = (folder / "state.safetensors").read_bytes()

    def read(chance):
        data = flipped(whole, chance)
        (folder / "state.safetensors").write_bytes(data)
        section["files"]["state.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        load_named(place, convert(section, Saved, Source("metadata")), allowed=False)

    return read


def fitted_features(folder):
    options = {"n": Number(clip="quantiles"), "c": Category(min_count=1), "l": Ids(buckets=9), "v": Vector()}
    options |= {"t": Text(tokens="a:b", buckets=5), "d": DateParts(parts=("year", "hour"))}
    rows = pa.record_batch(
        {
            "n": [1.0, None, 3.0],
            "c": ["x", "y", None],
            "l": [[1], [], None],
            "v": [[1.0, 2.0]] * 3,
            "t": ["p q", "", None],
            "d": pa.array([0, 10**15, None], pa.timestamp("us")),
        }
    )
    functions = {"a:b": str.split}
    document = json.loads(encode(fit(options, statistics_of(rows, options, functions)).to_json()))

    def read(chance):
        changed = parse(text_of(mutated(document, chance), chance), Source("the features"))
        features = Features.from_json(changed, Source("the features"), lambda _: str.split)
        assert features.hash
        assert features.schema
        features.apply(rows)

    return read


KINDS = [
    fitted_features,
    manifests,
    checkpoints,
    checkpoint_tensors,
    bundles,
    bundle_weights,
    events,
    registry_checkpoints,
    objects,
    object_tensors,
]


def try_many(make, folder, times):
    read, refused = make(folder), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(times):
        try:
            read(random.Random(seed))
        except SparkdlError:
            refused.append(seed)
        except BaseException as cause:
            raise AssertionError(f"seed {seed}: {type(cause).__name__}: {str(cause)[:500]}") from cause
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100 * 1024, f"took {grown >> 10} MiB"
    assert len(refused) > times // 4


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_changed_documents_are_refused_by_type(make, tmp_path):
    try_many(make, tmp_path, 40 if make is registry_checkpoints else 200)  # of a registry that is opened anew


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_hundred_thousand_changed_documents_are_refused_by_type(make, tmp_path, monkeypatch):
    monkeypatch.setattr(logger, "disabled", True)  # pytest keeps what is logged: 40,000 lines grew by 100 MiB
    try_many(make, tmp_path, 100_000)
