"""A pipeline from its source to predictions: ``spark-submit jobs/retrain.py --config FILE``.

Options and exit code are those of ``sparkdl run``.
"""

import sys

from sparkdl.cli import job

if __name__ == "__main__":
    sys.exit(job("run"))
