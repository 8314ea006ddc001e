"""A pipeline up to its published model, no predictions: ``spark-submit jobs/train.py --config FILE``.

Enters: the command line, with the options of ``sparkdl run``. Leaves: what ``sparkdl run --until publish`` leaves, and
its exit code; after ``etl.py`` it begins with the training.
"""

import sys

from sparkdl.cli import job

if __name__ == "__main__":
    sys.exit(job("run", "--until", "publish"))
