"""The GPUs and the number of threads that a rank may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparkdl.errors import ClusterError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def physical_gpus(addresses: Sequence[str], visible: str | None) -> list[str]:
    """Translate Spark's GPU ``addresses`` to what CUDA calls them: positions in CUDA_VISIBLE_DEVICES where it is set.

    Raises:
        ClusterError: an address lies beyond the list.
    """
    if not visible:
        return list(addresses)
    names = [name.strip() for name in visible.split(",")]
    physical = []
    for address in addresses:
        if not address.isdigit():
            physical.append(address)
        elif int(address) < len(names):
            physical.append(names[int(address)])
        else:
            raise ClusterError(
                f"Spark assigned GPU {address}, but CUDA_VISIBLE_DEVICES={visible} has {len(names)} entries: "
                f"let the GPU discovery script print 0..{len(names) - 1}"
            )
    return physical


def shared_order(gpus_by_local_rank: Sequence[Sequence[str]]) -> list[str]:
    """Return the GPU list that all ranks of a host see: position ``local_rank`` is that rank's first GPU.

    Every rank of a host sees the same list: first the first GPU of each rank in local-rank order, then the further
    ones. So ``torch.cuda.set_device(local_rank)``, which much existing code does, picks the rank's own GPU.

    Raises:
        ClusterError: two ranks were given the same GPU.
    """
    depth = max((len(gpus) for gpus in gpus_by_local_rank), default=0)
    order = [gpus[level] for level in range(depth) for gpus in gpus_by_local_rank if level < len(gpus)]
    twice = sorted({gpu for gpu in order if order.count(gpu) > 1})
    if twice:
        raise ClusterError(
            f"GPU {', '.join(twice)} was given to more than one rank of a host: check the executors' "
            f"CUDA_VISIBLE_DEVICES and spark.worker.resource.gpu.discoveryScript"
        )
    return order


def device_variables(
    mine: Sequence[str], order: Sequence[str], visible: str | None, initialized: bool
) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES and SPARKDL_DEVICE(S) of a rank that owns the GPUs ``mine``.

    Args:
        mine: this rank's GPUs, as CUDA calls them; none means CPU.
        order: what ``shared_order`` returned for this host.
        visible: CUDA_VISIBLE_DEVICES as it is in this process.
        initialized: whether CUDA has already read that variable in this process, so that changing it does nothing.

    Raises:
        ClusterError: CUDA runs in this reused process, and does not see the GPUs it now should.
    """
    if not mine:
        return {"SPARKDL_DEVICE": "cpu", "SPARKDL_DEVICES": "cpu"}
    visible_gpus = list(order)
    if initialized:
        visible_gpus = (
            [name.strip() for name in visible.split(",")] if visible else [str(number) for number in range(1024)]
        )
        missing = [gpu for gpu in mine if gpu not in visible_gpus]
        if missing:
            raise ClusterError(
                f"this worker already uses CUDA_VISIBLE_DEVICES={visible} and was now given GPU {', '.join(missing)}: "
                f"set spark.python.worker.reuse=false"
            )
    devices = [f"cuda:{visible_gpus.index(gpu)}" for gpu in mine]
    variables = {"SPARKDL_DEVICE": devices[0], "SPARKDL_DEVICES": ",".join(devices)}
    if not initialized:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(order)
    return variables


def host_gpus() -> list[str]:
    """Return the GPUs of this host without starting CUDA: CUDA_VISIBLE_DEVICES, or what NVIDIA's driver lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    listed = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number, _ in enumerate(listed.iterdir())] if listed.is_dir() else []


def thread_variables(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold math libraries to ``threads``, but those that ``environment`` has."""
    return {name: str(threads) for name in _THREAD_VARIABLES if name not in environment}


def threads_of(text: str) -> int | None:
    """Return the threads that OMP_NUM_THREADS asks for, of ``4,2`` at the outer level; None if it says none."""
    first = text.partition(",")[0].strip()
    return int(first) or None if first.isdecimal() else None


@contextmanager
def intra_op_threads(threads: int | None) -> Iterator[None]:
    """Hold a torch that is loaded already to ``threads`` for the block; one loaded later reads the variables."""
    torch: Any = sys.modules.get("torch")
    if torch is None or threads is None:
        yield
        return
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous_threads)


@contextmanager
def torch_settings() -> Iterator[None]:
    """Undo what the block changes of torch's default dtype, gradient mode and deterministic algorithms.

    They are the process's, and its next task may be another function's: a model made there would have another dtype.
    """
    torch: Any = sys.modules.get("torch")
    dtype = None if torch is None else torch.get_default_dtype()
    gradients = torch is None or torch.is_grad_enabled()
    deterministic = torch is not None and torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_default_dtype(dtype or torch.float32)
            torch.set_grad_enabled(gradients)
            if torch.are_deterministic_algorithms_enabled() != deterministic:
                torch.use_deterministic_algorithms(deterministic)
