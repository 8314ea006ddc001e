"""LightGBM whose threads sleep while they wait for each other.

GNU's OpenMP, which it brings its threads with, lets them spin: two threads on two busy processors took 24.7 s for
what one took 0.7 s for, and 2.4 s once they sleep (LightGBM 4.7, 60 rounds on 30,000 rows). The library reads the
variable once, when it is loaded. Where PyTorch 2.13 was imported before, as in a driver that has trained, LightGBM
takes PyTorch's copy, which has the same name and read no such variable: there its threads spin, and with another
process on one of two processors 405 rounds on 157,000 rows took 480 s for 4. It can go once LightGBM says how its
threads wait.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__all__ = ["patient_lightgbm"]

_POLICY = "OMP_WAIT_POLICY"


def patient_lightgbm() -> Any:
    """Import LightGBM; the environment is as before, and says how threads wait where the user says it."""
    if _POLICY in os.environ:
        return importlib.import_module("lightgbm")
    os.environ[_POLICY] = "PASSIVE"
    try:
        return importlib.import_module("lightgbm")
    finally:
        del os.environ[_POLICY]
