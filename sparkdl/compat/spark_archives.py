"""Python workers that read PySpark's modules from its folder, compiled, and not from the archives beside them."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_ARCHIVES = "python/lib/pyspark.zip", "python/lib/py4j-*-src.zip", "jars/spark-core_*.jar"


def leave_spark_archives() -> None:
    """Take Spark's archives off ``sys.path`` where the same modules lie in folders of it.

    Spark begins the path of its Python workers with ``python/lib/pyspark.zip``, Py4J's archive beside it, and a JAR.
    Modules in an archive are compiled anew by each process, and each new worker lists the 7,000 files of the three
    again: a daemon starts in 1.3 s with them, and in 0.3 s without. Of Spark 4.2 and 4.3
    (``PythonUtils.sparkPythonPath``); it can go when Spark leaves the archives out where PySpark is installed.
    """
    home = Path(os.environ.get("SPARK_HOME") or os.devnull).resolve()
    archives = [entry for entry in sys.path if any(Path(entry).resolve().match(str(home / name)) for name in _ARCHIVES)]
    folders = [entry for entry in sys.path if entry not in archives]
    pyspark, py4j = (PathFinder.find_spec(name, folders) for name in ("pyspark", "py4j"))
    if pyspark is None or py4j is None or Path(pyspark.origin or "").resolve().parent != home:
        return  # in its folders lies another PySpark, or none
    sys.path[:] = folders
    for archive in archives:
        sys.path_importer_cache.pop(archive, None)
