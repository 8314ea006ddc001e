"""A pipeline from its file, by ``spark-submit jobs/pipeline.py --config FILE``: ``sparkdl run`` with Spark's settings.

Enters: the command line. Leaves: what ``sparkdl run`` leaves, and its exit code. What ``spark-submit`` says of master,
memory and settings wins over the section ``spark`` of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sparkdl.cli import main

__all__ = ["run_pipeline"]


def run_pipeline(arguments: Sequence[str]) -> int:
    """Run ``--config FILE`` with the further options of ``sparkdl run``; return the exit code."""
    words = list(arguments)
    if "--config" in words[:-1]:
        place = words.index("--config")
        words = [words[place + 1], *words[:place], *words[place + 2 :]]
    return main(["run", *words])


if __name__ == "__main__":
    sys.exit(run_pipeline(sys.argv[1:]))
