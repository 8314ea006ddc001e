"""A version of a table read by whoever wants its rows, from the files that its log names, without Spark's reader.

Enters: a version, conditions. Leaves: record batches of the rows that they hold for, in the table's own types. Start at
``plan.py``, which runs on the driver: which files can be left out, and who reads which part of the others. ``read.py``
is what a worker does with a part; ``conditions.py`` has the meaning of ``where``.
"""
