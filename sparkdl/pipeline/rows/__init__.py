"""Which rows there are and what becomes of each: windows of a source, clean rows, parts that train and validate.

Enters: the sections ``source``, ``expect`` and ``split``. Leaves: rows with their window and outcome, and the books of
each window. Start at ``source.py``, then ``expect.py``; ``windows.py`` is pure, ``ledger.py`` remembers.
"""
