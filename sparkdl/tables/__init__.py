"""Delta tables: written in one commit, read at a pinned version.

Enters: DataFrames, small Arrow tables, predicates. Leaves: versions of a table, and what they hold. Start at
``table.py``. A write: Spark's tasks make files (``parquet.py``), the driver commits them together, deciding against the
newest version until nobody was faster (``commit.py``). ``delta.py`` has delta-rs's words, ``vacuum.py`` finds files
that no version names.
"""
