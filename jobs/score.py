"""The champion of a pipeline over what is new, no training: ``spark-submit jobs/score.py --config FILE``.

Enters: the command line, with the options of ``sparkdl run``. Leaves: what ``sparkdl run --without-training`` leaves,
and its exit code.
"""

import sys

from sparkdl.cli import job

if __name__ == "__main__":
    sys.exit(job("run", "--without-training"))
