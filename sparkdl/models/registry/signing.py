"""Signatures of a registry's events: whoever can write to its storage is not believed for that."""

from __future__ import annotations

import codecs
import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Literal

from sparkdl.config import require
from sparkdl.documents.typed import encode
from sparkdl.errors import ConfigError, IntegrityError
from sparkdl.models.registry.events import Event
from sparkdl.storage import Storage

VARIABLE, FILE_VARIABLE = "SPARKDL_REGISTRY_KEY", "SPARKDL_REGISTRY_KEY_FILE"
"""The key itself, and the names of files with one each, the first of which signs, as in PATH."""
_ED25519 = b"\x06\x03\x2b\x65\x70"
"""How a key of that kind says so in DER (RFC 8410)."""
_LEAST_BYTES = 32
_MOST_BYTES = 1 << 16
_CONTEXT = b"sparkdl registry event 1\n"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class SigningKey:
    """A key that signs events, or only checks them.

    Attributes:
        kind: ``"hmac-sha256"``, whose one secret does both, or ``"ed25519"``.
        id: stands in signatures, so that a reader knows which key he lacks.
        signs: False for a public key.
    """

    kind: Literal["hmac-sha256", "ed25519"]
    id: str
    signs: bool
    _private: bytes = field(repr=False, compare=False)
    _public: bytes = field(repr=False, compare=False)

    @staticmethod
    def of(key: str | bytes) -> SigningKey:
        """Make one of its text: PEM of an Ed25519 key, private or public; anything else is a secret.

        Raises:
            ConfigError: it is a secret of fewer than 32 bytes, or no such PEM; or what others may know: a key in
                another form, which may be a public one, or the path of a file.
        """
        data = (key.encode() if isinstance(key, str) else key).removeprefix(codecs.BOM_UTF8).strip()
        if data.startswith(b"-----BEGIN"):
            return _ed25519(data)
        require(
            b"-----BEGIN" not in data and _ED25519 not in data,
            "the registry's key is no secret: it holds a PEM behind other text, or a key in DER; give the PEM alone",
        )
        require(
            b"/" not in data or re.search(rb"\.[a-z]{1,5}$", data) is None,
            f"the registry's key is the path of a file, which is no secret: give it to SigningKey.from_file or in "
            f"{FILE_VARIABLE}",
        )
        require(
            len(data) >= _LEAST_BYTES,
            f"the registry's key has {len(data)} bytes, a secret has at least {_LEAST_BYTES}: make one with "
            "openssl rand -hex 32",
        )
        return SigningKey("hmac-sha256", _id(b"sparkdl registry secret\n" + data), True, data, b"")

    @staticmethod
    def from_file(file: str | os.PathLike[str]) -> SigningKey:
        """Read one from a file, a path or URI.

        Raises:
            ConfigError: it holds none.
            StorageError: it cannot be read.
        """
        return SigningKey.of(Storage.of(file).read_bytes(at_most=_MOST_BYTES))

    def sign(self, message: bytes) -> str:
        """The signature, ``kind:id:hexadecimal digits``; only of a key that signs."""
        if self.kind == "hmac-sha256":
            signed_bytes = hmac.digest(self._private, message, hashlib.sha256)
        else:
            signed_bytes = _cryptography().Ed25519PrivateKey.from_private_bytes(self._private).sign(message)
        return f"{self.kind}:{self.id}:{signed_bytes.hex()}"

    def fits(self, message: bytes, signature: str) -> bool:
        """Whether this key made a signature of these bytes."""
        if self.kind == "hmac-sha256":
            return hmac.compare_digest(self.sign(message).encode(), signature.encode())
        library = _cryptography()
        try:
            signed_bytes = bytes.fromhex(signature.rpartition(":")[2])
            library.Ed25519PublicKey.from_public_bytes(self._public).verify(signed_bytes, message)
        except (library.InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True)
class Keys:
    """The keys that a registry was opened with: the first signs, each of them is believed.

    Signed is all that an event says, its place in the log included: a publication with the content hash of its bundle,
    metrics and lineage, a move of an alias. What no signature shows is that the newest events are there: whoever can
    delete them can take the registry back.

    Attributes:
        keys: none where nothing is signed and nothing checked.
    """

    keys: tuple[SigningKey, ...] = ()

    @staticmethod
    def of(given: SigningKey | Sequence[SigningKey] | None) -> Keys:
        """The keys given; without, those of the environment.

        Raises:
            ConfigError: what is given is no key.
            StorageError: a file that the environment names cannot be read.
        """
        if given is None:
            files = [name for name in os.environ.get(FILE_VARIABLE, "").split(os.pathsep) if name]
            text = os.environ.get(VARIABLE, "")
            return Keys((*([SigningKey.of(text)] if text else []), *map(SigningKey.from_file, files)))
        keys = (given,) if isinstance(given, SigningKey) else tuple(given)
        wrong = [type(key).__name__ for key in keys if not isinstance(key, SigningKey)]
        require(not wrong, f"key= is a {wrong[:1]}, not a SigningKey: give SigningKey.of(text) or .from_file(path)")
        return Keys(keys)

    def __bool__(self) -> bool:
        return bool(self.keys)

    def check_signs(self) -> None:
        """Refuse to change a registry that was opened with a key that only checks.

        Raises:
            ConfigError: it was.
        """
        if self.keys and not self.keys[0].signs:
            raise ConfigError(
                f"the registry was opened with the public key {self.keys[0].id}, which signs nothing: open it with "
                "the private one to publish or to move an alias"
            )

    def signed(self, event: Event) -> Event:
        """The event with its signature; without keys as it is.

        Raises:
            ConfigError: the key only checks.
        """
        if not self.keys:
            return event
        self.check_signs()
        return replace(event, signature=self.keys[0].sign(_message(event)))

    def check(self, event: Event) -> None:
        """Refuse an event that none of the keys has signed; without keys, none.

        Raises:
            IntegrityError: it is not signed, by another key, or differs from what was signed.
        """
        if not self.keys:
            return
        subject = f"version {event.version} of {event.name!r}"
        if event.alias is not None:
            subject = f"the move of {event.alias!r} to {subject}"
        key_ids = ", ".join(key.id for key in self.keys)
        if event.signature is None:
            raise IntegrityError(
                f"{subject} is not signed, and the registry was opened with the key {key_ids}: publish or promote "
                "again with this key, or open the registry without one"
            )
        kind, _, id_and_bytes = event.signature.partition(":")
        fitting = [key for key in self.keys if (key.kind, key.id) == (kind, id_and_bytes.partition(":")[0])]
        if not fitting:
            raise IntegrityError(
                f"{subject} is signed with the key {id_and_bytes.partition(':')[0][:32]!r}, and the registry was "
                f"opened with {key_ids}: open it with that key, if you trust it, or publish or promote again with yours"
            )
        if not fitting[0].fits(_message(event), event.signature):
            raise IntegrityError(
                f"{subject} is not what the key {fitting[0].id} has signed: the registry was altered, restore it, or "
                "publish or promote again"
            )


def _message(event: Event) -> bytes:
    """The bytes that are signed: all of an event but its signature."""
    row = {name: value for name, value in sorted(event.to_row().items()) if name != "signature"}
    time = None if event.time is None else (event.time - _EPOCH) // timedelta(microseconds=1)
    return _CONTEXT + encode({**row, "time": time})


def _id(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _ed25519(pem: bytes) -> SigningKey:
    library = _cryptography()
    private = b"PRIVATE KEY" in pem.splitlines()[0]
    try:
        key = library.load_pem_private_key(pem, None) if private else library.load_pem_public_key(pem)
    except (ValueError, TypeError, library.UnsupportedAlgorithm) as cause:
        raise ConfigError(
            f"the registry's key is no PEM that can be read: {cause}; give it without a password"
        ) from cause
    if not isinstance(key, library.Ed25519PrivateKey | library.Ed25519PublicKey):
        raise ConfigError(
            f"the registry's key is a {type(key).__name__}, not an Ed25519 one: make it with openssl genpkey "
            "-algorithm ed25519"
        )
    public = (key.public_key() if private else key).public_bytes_raw()
    return SigningKey("ed25519", _id(public), private, key.private_bytes_raw() if private else b"", public)


def _cryptography() -> Any:
    """What of the package is used here; it is needed for Ed25519 alone."""
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
    except ImportError as cause:
        raise ConfigError(
            "Ed25519 keys need the package cryptography: pip install 'sparkdl[signing]', or use a secret"
        ) from cause
    return SimpleNamespace(
        InvalidSignature=InvalidSignature,
        UnsupportedAlgorithm=UnsupportedAlgorithm,
        Ed25519PrivateKey=Ed25519PrivateKey,
        Ed25519PublicKey=Ed25519PublicKey,
        load_pem_private_key=load_pem_private_key,
        load_pem_public_key=load_pem_public_key,
    )
