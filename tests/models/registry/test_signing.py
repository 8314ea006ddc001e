"""Signed registries: what was not signed, or is not what was signed, is refused before anything is made of it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from torch import nn

from sparkdl.errors import ConfigError, IntegrityError
from sparkdl.models.bundle import save_bundle
from sparkdl.models.registry import ModelRegistry, SigningKey
from sparkdl.models.registry.events import EVENTS, SIGNED_EVENTS, Event, State

SECRET = "5d41402abc4b2a76b9719d911017c592"


def pem():
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    private = ed25519.Ed25519PrivateKey.generate()
    return (
        private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    )


def secret_pair():
    return SigningKey.of(SECRET), SigningKey.of(SECRET.encode())


def ed25519_pair():
    private, public = pem()
    return SigningKey.of(private), SigningKey.of(public)


@pytest.fixture(params=[secret_pair, ed25519_pair], ids=["hmac", "ed25519"])
def pair(request):
    """A key that signs, and one that checks."""
    return request.param()


def altered(registry, sequence, **changes):
    """Replace a row of the table by another, and forget the checkpoint."""
    rows = sorted(registry._log.table.rows().to_pylist(), key=lambda row: row["sequence"])
    rows[sequence] |= changes
    place = registry._log.table
    folder = registry._root.child("events")
    folder.delete(recursive=True)
    registry._root.child("state").delete(recursive=True)
    place.append(pa.Table.from_pylist(rows, schema=SIGNED_EVENTS))
    return ModelRegistry(registry.uri, key=registry.key)


def test_what_one_signs_the_other_loads(tmp_path, bundle, pair):
    signing, checking = pair
    writer, reader = (ModelRegistry(str(tmp_path / "registry"), key=key) for key in pair)
    made = writer.publish("m", bundle, metrics={"mae": 1.5}, parameters={"a": {"z": 1, "b": [0.1, 1e-300]}})
    writer.set_alias("m", "champion", 1, expected=None)
    for _ in range(20):  # through a checkpoint, too
        writer.publish("m", bundle, metrics={"mae": float("nan")})
    assert made.signature.startswith(f"{signing.kind}:{signing.id}:")
    assert signing.id == checking.id
    assert isinstance(reader.load("m", "champion").model, nn.Linear)
    assert reader.get("m", 17).signature != made.signature
    assert reader.bundle("m", 17).content_hash == made.artifact


def test_a_public_key_changes_nothing(tmp_path, bundle):
    private, public = ed25519_pair()
    registry = ModelRegistry(str(tmp_path / "registry"), key=private)
    registry.publish("m", bundle)
    registry.set_alias("m", "champion", 1, expected=None)
    reader = ModelRegistry(registry.uri, key=public)
    for change in (
        lambda: reader.publish("m", bundle),
        lambda: reader.set_alias("m", "a", 1, expected=None),
        lambda: reader.delete("m", 1),
        lambda: reader.rollback("m", "champion"),
    ):
        with pytest.raises(ConfigError, match=r"public key \w+, which signs nothing: open it with the private one"):
            change()
    assert len(registry.history("m")) == 2
    assert reader.set_alias("m", "a", 1, expected=None, dry_run=True).moved


def test_unsigned_versions_are_refused_with_a_key_and_can_be_published_again(registry, bundle):
    registry.publish("m", bundle)
    registry.publish("m", bundle)
    registry.set_alias("m", "champion", 1, expected=None)
    signed = ModelRegistry(registry.uri, key=SigningKey.of(SECRET))
    for refused in (
        lambda: signed.get("m", 1),
        lambda: signed.get("m", "champion"),
        lambda: signed.load("m", 1),
        lambda: signed.set_alias("m", "champion", 2, expected=1),
    ):
        with pytest.raises(IntegrityError, match=r"is not signed, and the registry was opened with the key \w+: "):
            refused()
    assert [each.signature for each in signed.list("m")] == [None, None]
    again = signed.publish("m", bundle)
    assert signed.set_alias("m", "champion", again.version, expected=1).moved
    assert signed.get("m", "champion").version == 3
    assert registry.get("m", "champion").version == 3  # who has no key reads on
    assert ModelRegistry(registry.uri).publish("m", bundle).version == 4
    with pytest.raises(IntegrityError, match="version 4 of 'm' is not signed"):
        signed.get("m", 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"artifact": "b" * 64},
        {"metrics": '{"mae":0.1}'},
        {"lineage": "{}"},
        {"version": 3},
        {"publication": "another"},
        {"time": datetime(2020, 1, 1, tzinfo=UTC)},
        {"signature": "hmac-sha256"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_altered_publication_is_refused(tmp_path, bundle, changes):
    registry = ModelRegistry(str(tmp_path / "registry"), key=SigningKey.of(SECRET))
    for _ in range(2):
        registry.publish("m", bundle, metrics={"mae": 1.0})
    if changes == {"signature": "hmac-sha256"}:
        changes = {"signature": registry.get("m", 1).signature}  # of another event
    other = altered(registry, 1, **changes)
    which = changes.get("version", 2)
    with pytest.raises(IntegrityError, match=r"is not what the key \w+ has signed"):
        other.get("m", which)
    with pytest.raises(IntegrityError, match=r"is not what the key \w+ has signed"):
        other.set_alias("m", "champion", which, expected=None)
    assert other.get("m", 1).version == 1


def test_an_altered_move_of_an_alias_is_refused(tmp_path, bundle):
    registry = ModelRegistry(str(tmp_path / "registry"), key=SigningKey.of(SECRET))
    for _ in range(2):
        registry.publish("m", bundle)
    registry.set_alias("m", "champion", 1, expected=None)
    other = altered(registry, 2, version=2)
    with pytest.raises(IntegrityError, match="the move of 'champion' to version 2 of 'm' is not what the key"):
        other.get("m", "champion")
    row = Event(kind="aliased", name="m", alias="champion", version=2, sequence=3, time=datetime.now(UTC)).to_row()
    plain = altered(registry, 2)
    plain._log.table.append(pa.Table.from_pylist([row], schema=SIGNED_EVENTS))
    with pytest.raises(IntegrityError, match="the move of 'champion' to version 2 of 'm' is not signed"):
        plain.get("m", "champion")


@pytest.mark.parametrize("where", ["table", "checkpoint"])
def test_an_event_taken_out_of_the_middle_is_noticed(tmp_path, bundle, where):
    registry = ModelRegistry(str(tmp_path / "registry"), key=SigningKey.of(SECRET))
    for _ in range(2):
        registry.publish("m", bundle)
    registry.set_alias("m", "champion", 1, expected=None)
    registry.set_alias("m", "champion", 2, expected=1)  # event 3; without it the champion would be version 1
    registry.publish("m", bundle)
    rows = [row for row in registry._log.table.rows().to_pylist() if row["sequence"] != 3]
    others = pa.Table.from_pylist(rows, schema=SIGNED_EVENTS)
    if where == "checkpoint":
        newest = registry._log._read_table()
        proof = registry._log.table.journal.proof(newest.version)
        state = State(others, str)
        registry._log._write_checkpoint(replace(newest, state=state, proof=proof))
        assert ModelRegistry(registry.uri, key=registry.key).get("m", "champion").version == 2
        return
    registry._root.child("events").delete(recursive=True)
    registry._root.child("state").delete(recursive=True)
    registry._log.table.append(others)
    with pytest.raises(IntegrityError, match="event 3 is missing, or stands there twice"):
        ModelRegistry(registry.uri, key=registry.key).get("m", "champion")


def test_another_bundle_under_a_signed_name_is_refused(tmp_path, bundle):
    registry = ModelRegistry(str(tmp_path / "registry"), key=SigningKey.of(SECRET))
    made = registry.publish("m", bundle)
    save_bundle(nn.Linear(2, 1), str(tmp_path / "other"))
    for name in ("bundle.json", "weights.safetensors"):
        target = tmp_path / "registry" / "artifacts" / made.artifact / name
        target.write_bytes((tmp_path / "other" / name).read_bytes())
    for refused in (lambda: registry.get("m", 1), lambda: registry.set_alias("m", "a", 1, expected=None)):
        with pytest.raises(IntegrityError, match="content hash"):
            refused()


def test_keys_are_exchanged_by_believing_both_for_a_while(tmp_path, bundle):
    old, new = SigningKey.of(SECRET), SigningKey.of(SECRET[::-1])
    registry = ModelRegistry(str(tmp_path / "registry"), key=old)
    registry.publish("m", bundle)
    both = ModelRegistry(registry.uri, key=[new, old])
    assert both.get("m", 1).version == 1
    assert both.publish("m", bundle).signature.split(":")[1] == new.id
    with pytest.raises(
        IntegrityError, match=f"is signed with the key '{new.id}', and the registry was opened with {old.id}"
    ):
        registry.get("m", 2)


def test_the_environment_says_the_key_where_nobody_else_does(registry, bundle, tmp_path, monkeypatch):
    registry.publish("m", bundle)
    (tmp_path / "key").write_text(SECRET + "\n")
    monkeypatch.setenv("SPARKDL_REGISTRY_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(IntegrityError, match="is not signed"):
        ModelRegistry(registry.uri).get("m", 1)
    assert ModelRegistry(registry.uri, key=()).get("m", 1).version == 1
    made = ModelRegistry(registry.uri).publish("m", bundle)
    monkeypatch.delenv("SPARKDL_REGISTRY_KEY_FILE")
    monkeypatch.setenv("SPARKDL_REGISTRY_KEY", SECRET)
    assert ModelRegistry(registry.uri).get("m", made.version).signature == made.signature


def test_a_key_that_is_none_is_refused(tmp_path):
    for text, message in [
        ("short", "has 5 bytes, a secret has at least 32: make one with openssl rand -hex 32"),
        ("-----BEGIN PRIVATE KEY-----\nMC4C\n-----END PRIVATE KEY-----", "is no PEM that can be read"),
        (rsa(), "is a _?RSAPrivateKey, not an Ed25519 one"),
        ("# ours\n-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----", "is no secret: it holds a PEM behind"),
        (bytes.fromhex("302a300506032b6570032100") + b"p" * 32, "or a key in DER; give the PEM alone"),
        ("/dbfs/security/keys/registry-of-all-jobs.pem", "is the path of a file, which is no secret"),
    ]:
        with pytest.raises(ConfigError, match=message):
            SigningKey.of(text)
    assert SigningKey.of("\ufeff" + SECRET).id == SigningKey.of(SECRET).id  # as some editors begin a file
    with pytest.raises(ConfigError, match="not a SigningKey"):
        ModelRegistry(str(tmp_path), key="a" * 64)


def rsa():
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = rsa.generate_private_key(65537, 1024)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def test_a_key_is_shown_and_stored_nowhere(tmp_path, bundle, pair, caplog):
    key = pair[0]
    registry = ModelRegistry(str(tmp_path / "registry"), key=key)
    caplog.set_level("DEBUG")
    registry.publish("m", bundle)
    assert pickle.loads(pickle.dumps(registry)).publish("m", bundle).version == 2
    for text in (repr(registry), repr(key), str(key), caplog.text, repr(registry._keys)):
        assert SECRET not in text
        assert key._private.hex() not in text
    stored = b"".join(file.read_bytes() for file in (tmp_path / "registry").rglob("*") if file.is_file())
    assert key._private not in stored
    assert key._private.hex().encode() not in stored


def test_a_registry_without_a_key_keeps_the_columns_that_every_sparkdl_knows(registry, bundle):
    registry.publish("m", bundle)
    assert registry._log.table.columns() == EVENTS.names
    registry = replace(registry, key=SigningKey.of(SECRET))
    registry.publish("m", bundle)
    assert registry._log.table.columns() == SIGNED_EVENTS.names
    assert [each.version for each in registry.list("m")] == [1, 2]


def test_a_move_that_the_key_lacks_is_signed_by_promoting_to_the_same_version(tmp_path, bundle):
    first, second = SigningKey.of(SECRET), SigningKey.of(SECRET[::-1])
    registry = ModelRegistry(str(tmp_path / "registry"), key=first)
    for mae in (3.0, 2.0, 1.0):
        registry.publish("m", bundle, metrics={"mae": mae})
    registry.set_alias("m", "champion", 1, expected=None)
    ModelRegistry(registry.uri, key=()).set_alias("m", "champion", 2, expected=1)
    with pytest.raises(IntegrityError, match="the move of 'champion' to version 2 of 'm' is not signed"):
        registry.get("m", "champion")
    assert registry.set_alias("m", "champion", 2, expected=2, dry_run=True).moved
    assert registry.set_alias("m", "champion", 2, expected=2).moved
    assert registry.get("m", "champion").version == 2
    assert not registry.set_alias("m", "champion", 2, expected=2).moved
    ModelRegistry(registry.uri, key=()).set_alias("m", "champion", 3, expected=2)
    done = registry.promote_if_better("m", "champion", 3, metric="mae")
    assert (done.moved, done.reason) == (True, "version 3 is the champion already, signed again")
    assert registry.get("m", "champion").version == 3
    changed = ModelRegistry(registry.uri, key=[second, first])
    assert not changed.set_alias("m", "champion", 3, expected=3).moved  # believed as it is
    assert len(registry.history("m")) == 8
    back = [registry.rollback("m", "champion").version for _ in range(2)]  # not to the version that it is at
    assert back == [2, 1]


def test_a_collection_with_a_public_key_deletes_no_version_and_says_so(tmp_path, bundle):
    private, public = ed25519_pair()
    registry = ModelRegistry(str(tmp_path / "registry"), key=private)
    for _ in range(3):
        registry.publish("m", bundle)
    reader = ModelRegistry(registry.uri, key=public)
    now = timedelta(0)
    assert len([each for each in reader.gc(now, keep_last=1, dry_run=True) if each.kind == "version"]) == 2
    with pytest.raises(ConfigError, match="public key"):
        reader.gc(now, keep_last=1)
    assert reader.gc(now) == []
    assert len(registry.list("m")) == 3
