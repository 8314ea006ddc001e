"""Pickles whose tensors lie beside them, as views of the memory that they have."""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparkdl.compat.pickles import Pickler

_SHARED_BYTES = 64 << 20
"""Storages below this are copied in any case: torch's own memory begins at multiples of 64 bytes, received memory does
not, and where a storage begins may change the last bit of a result. Larger ones begin alike, each in pages of its own.
"""


@dataclass(frozen=True, slots=True)
class Payload:
    """A packed value.

    The bytes of each storage are an array that shares its memory: packing costs no copy, and neither does sending,
    since an array leaves a pickle of protocol 5 as a buffer of its own. Two tensors on one storage share it afterwards,
    too.

    Opening one runs what the pickle says. A payload is never read from a file: it comes from this process, or over the
    channel between driver and ranks, each frame of which the secret of the run has signed (``launch/wire.py``).

    Attributes:
        data: the pickle.
        storages: the memory of its tensors, one array of bytes each.
        modules: top-level modules outside the standard library that the workers must be able to import to open it.
    """

    data: bytes
    storages: tuple[npt.NDArray[np.uint8], ...] = ()
    modules: tuple[str, ...] = ()

    @staticmethod
    def of(value: Any) -> Payload:
        """Pack ``value``; its tensors on the CPU are not copied, so they must not change before it is sent or opened.

        Raises:
            Exception: whatever pickling raises.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(value)
        return Payload(buffer.getvalue(), tuple(pickler.storages))

    def open(self, *, share: bool = False) -> Any:
        """Return the value.

        Args:
            share: let its tensors lie in the memory of the payload, which is then used up: by who has received it, and
                opens it once. Otherwise they get memory of their own, and the value is a copy.
        """
        return _Unpickler(self.data, self.storages, share).load()


def _copied(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The bytes in memory that torch has allocated."""
    copied = torch.empty(array.nbytes, dtype=torch.uint8).numpy()
    copied[:] = array
    return copied


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """Attributes that torch puts on any optimizer: its constructor, and schedulers, which wrap ``step``."""
    return frozenset({*vars(torch.optim.Optimizer([torch.zeros(1)], {})), "step", "_opt_called"})


class _Pickler(Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self.storages: list[npt.NDArray[np.uint8]] = []
        self._places: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        """Let an optimizer keep what its class has beside groups and state: ``Optimizer.__getstate__`` leaves it out.

        LBFGS has its list of parameters there, others the optimizer that they wrap. What torch itself puts on every
        optimizer, such as hooks, is left out as before.
        """
        plain = isinstance(value, torch.optim.Optimizer) and (
            type(value).__getstate__ is torch.optim.Optimizer.__getstate__
            and type(value).__reduce_ex__ is object.__reduce_ex__
        )
        if not plain:
            return super().reducer_override(value)
        extra_attributes = {name: part for name, part in vars(value).items() if name not in _of_every_optimizer()}
        return copyreg.__newobj__, (type(value),), {**extra_attributes, **value.__getstate__()}  # type: ignore[attr-defined]

    def persistent_id(self, value: Any) -> Any:
        typed = isinstance(value, torch.TypedStorage)
        storage = value._untyped_storage if typed else value
        if not isinstance(storage, torch.UntypedStorage) or storage.device.type != "cpu" or not storage.nbytes():
            return None
        number = self._places.setdefault(storage.data_ptr(), len(self.storages))
        if number == len(self.storages):
            # The array keeps the storage alive, and so its address unique.
            self.storages.append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        return number, value.dtype if typed else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, storages: Sequence[npt.NDArray[np.uint8]], share: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._arrays, self._share = storages, share
        self._made: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        number, dtype = pid
        if number not in self._made:
            array = self._arrays[number]
            shared = self._share and array.nbytes >= _SHARED_BYTES and array.flags.writeable
            storage_bytes = array if shared else _copied(array)
            self._made[number] = torch.from_numpy(storage_bytes).untyped_storage()
        storage = self._made[number]
        if dtype is None:
            return storage
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
