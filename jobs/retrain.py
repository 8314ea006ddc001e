"""A pipeline from its source to predictions: ``spark-submit jobs/retrain.py --config FILE``.

Enters: the command line, with the options of ``sparkdl run``. Leaves: what ``sparkdl run`` leaves, and its exit code.
"""

import sys

from sparkdl.cli import job

if __name__ == "__main__":
    sys.exit(job("run"))
