"""LightGBM's threads sleep while they wait, and nobody else's environment changes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("lightgbm")

PROGRAM = """
import os
from sparkdl.compat.lightgbm import patient_lightgbm
module = patient_lightgbm()
assert module.__name__ == "lightgbm"
print(os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_openmp_is_told_when_it_is_loaded_and_the_environment_stays(given, policy):
    """OMP_DISPLAY_ENV makes GNU's OpenMP say what it has read."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "TRUE"} | ({} if given is None else {"OMP_WAIT_POLICY": given})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
    assert done.stdout.strip() == str(given)
