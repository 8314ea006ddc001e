"""Delta tables: written in one commit, read at a pinned version.

Enters: DataFrames and predicates. Leaves: versions of a table. Start at ``table.py``.
"""
