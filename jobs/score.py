"""The champion of a pipeline over what is new, no training: ``spark-submit jobs/score.py --config FILE``.

Options and exit code are those of ``sparkdl run``.
"""

import sys

from sparkdl.cli import job

if __name__ == "__main__":
    sys.exit(job("run", "--without-training"))
