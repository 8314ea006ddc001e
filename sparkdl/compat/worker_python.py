"""The driver's interpreter for the Python workers of this host, where nobody chose another one."""

from __future__ import annotations

import os
import sys
from typing import Any

from sparkdl.compat.spark_master import is_connect


def use_drivers_python(spark: Any) -> None:
    """Let workers on this host run this process's interpreter, unless PYSPARK_PYTHON or Spark's settings say another.

    PySpark starts its workers with PYSPARK_PYTHON, or else with the first ``python3`` on the PATH, which in a virtual
    environment started by its full path is another interpreter: every task then fails in 60 lines of Java. On a cluster
    the workers' paths are not the driver's; there Spark's own error is mapped to one sentence. Of pyspark 4.2 and 4.3
    (``SparkContext.pythonExec``); it can go when PySpark defaults to the driver's interpreter for local masters.

    Args:
        spark: the session; one of Spark Connect is left alone, for its server chooses.
    """
    context = None if is_connect(spark) else spark.sparkContext
    if "PYSPARK_PYTHON" in os.environ or context is None or context._jsc is None:  # none: the session has been stopped
        return
    if context.getConf().get("spark.pyspark.python"):
        return
    if str(context.master).startswith("local"):
        context.pythonExec = sys.executable
