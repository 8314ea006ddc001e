"""Where a Spark session runs its tasks, as the module of its class and the name of its master tell.

Of pyspark 4.0 to 4.3, which have no public word for either; it can go when a session tells both.
"""

from __future__ import annotations

from typing import Any


def is_connect(spark: Any) -> bool:
    """Whether a session is one of Spark Connect, whose server may be anywhere."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local(spark: Any) -> bool:
    """Whether tasks run in the process of Spark's driver; executors of ``local-cluster`` are processes of their own."""
    return master_of(spark).partition("[")[0] == "local"


def master_of(spark: Any) -> str:
    """The name of the session's master, such as ``local[2]``; empty where a server does not tell it."""
    return str(spark.conf.get("spark.master", ""))
