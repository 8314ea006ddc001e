"""A pipeline up to its published model, no predictions: ``spark-submit jobs/train.py --config FILE``.

Options are those of ``sparkdl run``; after ``etl.py`` it begins with the training.
"""

import sys

from sparkdl.cli import job

if __name__ == "__main__":
    sys.exit(job("run", "--until", "publish"))
