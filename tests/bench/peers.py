"""The environment in which the peers still run: made once per user, away from the project's own.

Horovod's Spark runner and petastorm need pyspark 3.4 and pyarrow 10; the project needs neither. ``python peers.py``
makes the environment and prints its interpreter; a benchmark asks for it with ``interpreter()``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

CACHE = Path(os.environ.get("SPARKDL_CACHE", Path.home() / ".cache" / "sparkdl"))
HOME = CACHE / "peers"
TORCH = "torch==2.13.0"
PINS = (
    "numpy==1.24.4",
    "pandas==1.5.3",
    "pyarrow==10.0.1",
    "pyspark==3.4.4",
    "petastorm==0.12.1",
    "fsspec<2025",
    "tensorboard",
    "setuptools<80",
    "wheel",
    "packaging",
    "cloudpickle",
    "psutil",
    "pyyaml",
    "cffi",
)


def interpreter() -> Path:
    """Return the Python of the peers' environment, which is made first if need be (a few minutes).

    Raises:
        RuntimeError: Horovod's wheel, which the project's own set-up builds, is not there.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    wanted = hashlib.sha256("\n".join((TORCH, *PINS)).encode()).hexdigest()
    done, python = HOME / "done", HOME / "venv" / "bin" / "python"
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and done.read_text() == wanted:
            return python
        wheels = sorted((CACHE / "wheels").glob("*/horovod-0.28.1-*.whl"))
        if not wheels:
            raise RuntimeError("there is no Horovod wheel in the cache: run `make install` first")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME / "venv")], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        index = os.environ.get("SPARKDL_TORCH_ARGS", "").split()
        subprocess.run([*pip, TORCH, *index], check=True)
        subprocess.run([*pip, *PINS], check=True)
        subprocess.run([*pip, "--no-deps", str(wheels[-1])], check=True)
        done.write_text(wanted)
    return python


if __name__ == "__main__":
    print(interpreter())
