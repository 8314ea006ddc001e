"""From a table to predictions, and again tomorrow: one file says what, and what has not changed is not done again.

Enters: a pipeline file. Leaves: tables, shards, a published model, predictions, a report, and a record of the run.
``spec/`` says what a file may hold, and ``file/`` reads one: start at ``file/load.py``.
"""
