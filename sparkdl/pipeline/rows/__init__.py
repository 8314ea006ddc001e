"""What becomes of each row of a source: whether it is kept, in which part, and what the ledger says of its window.

Enters: rows with their window, the sections ``expect`` and ``split``. Leaves: rows with their outcome, and the books of
each window. Start at ``expect.py``; ``ledger.py`` remembers.
"""
