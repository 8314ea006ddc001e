"""Rows, features and shards of a pipeline, no training: ``spark-submit jobs/etl.py --config FILE``.

Options are those of ``sparkdl run``; ``train.py`` goes on from there, on other machines perhaps.
"""

import sys

from sparkdl.cli import job

if __name__ == "__main__":
    sys.exit(job("run", "--until", "shards"))
