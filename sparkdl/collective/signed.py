"""Python objects on their way between ranks: pickled, and signed with a key of the run, as pickles run code."""

from __future__ import annotations

import hmac
import os
import pickle
import struct
from typing import Any

import torch

from sparkdl.compat.pickles import dumps
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.launch.store import store_of_this_run
from sparkdl.world import World

SECRET = "SPARKDL_SECRET"
"""Variable with which ranks that another launcher started share a secret."""

_TAG_BYTES = 32
_MIN_CHARACTERS = 16


class _Unpicklable:
    """Travels in the place of a value that could not be pickled, so that no other rank waits for it in vain."""

    def __init__(self, message: str) -> None:
        self.message = message


class SignedObjects:
    """Packs and unpacks the objects of one collective; every rank makes one, and counts the operations alike.

    The connections are the backend's, and prove nothing of who wrote what comes. A value is unpacked if a rank of this
    run signed it for this very place in this very operation.

    Raises:
        ConfigError: ranks that another launcher started share no secret.
    """

    def __init__(self, world: World) -> None:
        self._rank = world.rank
        self._key = _key(world)
        self._operation = 0

    def pack(self, value: Any) -> torch.Tensor:
        """Return ``value`` as a flat tensor of bytes; where it cannot be pickled, the reason why. Raises nothing."""
        try:
            blob = dumps(value)
        except Exception as error:
            text = f"{type(value).__name__} cannot be pickled ({type(error).__name__}: {error})"
            blob = dumps(_Unpicklable(text))
        return torch.frombuffer(bytearray(self._tag(self._rank, blob) + blob), dtype=torch.uint8)

    def unpack(self, flat: torch.Tensor, rank: int) -> Any:
        """Return the value in the bytes of ``flat``, which ``rank`` is said to have sent.

        Raises:
            ClusterError: it did not, or could not pickle its value.
        """
        data = flat.numpy().data
        if not hmac.compare_digest(self._tag(rank, data[_TAG_BYTES:]), bytes(data[:_TAG_BYTES])):
            raise ClusterError(
                f"what came in the place of rank {rank}'s value does not carry the signature of this run, and was not "
                f"opened: something else writes into the connections between the ranks"
            )
        value = pickle.loads(data[_TAG_BYTES:])
        if isinstance(value, _Unpicklable):
            raise ClusterError(f"rank {rank} sent a value that does not travel: {value.message}; send plain data")
        return value

    def next_operation(self) -> None:
        """Count an operation as done: what was signed for it opens nothing any more."""
        self._operation += 1

    def _tag(self, rank: int, blob: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, struct.pack("<qq", self._operation, rank), "sha256")
        mac.update(blob)
        return mac.digest()


def _key(world: World) -> bytes:
    """Return the key of this collective: of the run, and of how often its ranks have opened one."""
    store = store_of_this_run()
    if world.size == 1 or store is None:
        return secret_of_run(world, "objects")
    return store.derive_key(f"objects {store.add(f'sparkdl/collectives/{world.rank}', 1)}")


def secret_of_run(world: World, purpose: str) -> bytes:
    """Return a secret that all ranks of this run share, and nobody else, for ``purpose`` alone.

    Raises:
        ConfigError: another launcher started the ranks, and gave them none.
    """
    if world.size == 1:
        return os.urandom(32)
    store = store_of_this_run()
    if store is not None:
        return store.derive_key(purpose)
    secret = os.environ.get(SECRET, "")
    if len(secret) < _MIN_CHARACTERS:
        raise ConfigError(
            f"{SECRET} has {len(secret)} characters, and ranks of another launcher need at least {_MIN_CHARACTERS} "
            f"to know each other's objects by: start them with sparkdl.run, or give all of them one random text"
        )
    return hmac.digest(secret.encode(), purpose.encode(), "sha256")
