"""The random number generators of one rank: torch's (CPU and the rank's GPU), NumPy's and Python's."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def seed_rank(seed: int, rank: int) -> None:
    """Give each ``data_rank`` streams of its own: dropout differs between rows, and is the same where rows are."""
    first, second, third = (int(n) for n in np.random.SeedSequence([seed % 2**63, rank]).generate_state(3))
    torch.manual_seed(first)
    np.random.seed(second)
    random.seed(third)


def capture(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (name, keys, int(position), int(has_gauss), float(gauss)),
        "python": (version, np.array(internal, dtype=np.int64), gauss_next),
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Bring all generators into captured states."""
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    np.random.set_state(tuple(state["numpy"]))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(int(n) for n in internal), gauss_next))


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Leave the caller's generators as they were."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Allow only deterministic kernels inside the block."""
    if not wanted:
        yield
        return
    was_wanted, was_warning = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        if workspace is None:
            os.environ.pop(_CUBLAS, None)
        torch.use_deterministic_algorithms(was_wanted, warn_only=was_warning)
        torch.backends.cudnn.benchmark = benchmark
