"""Delta tables: written in one commit, read at a pinned version.

Enters: DataFrames, small Arrow tables, predicates. Leaves: versions of a table, and what they hold. Start at
``table.py``; ``engine.py`` says which engine a table has. ``spark_delta.py`` is Spark's Delta, in a session with its
extension, or behind a catalog's name. ``delta_rs.py`` needs no JAR: Spark's tasks make files (``parquet.py``), the
driver commits them together, deciding against the newest version until nobody was faster (``commit.py``), and says in
the history what it did (``record.py``); ``nulls.py`` finds nulls where the table forbids them, ``reading.py`` makes a
DataFrame of a version, ``features.py`` refuses what delta-rs lacks, ``scan/`` lets workers read files themselves,
``delta.py`` has delta-rs's words, ``vacuum.py`` finds files that no version names.
"""
