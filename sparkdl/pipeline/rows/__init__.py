"""What becomes of each row of a source: whether it is kept, in which part, and how many rows its window has.

Enters: rows with their window, the sections ``expect`` and ``split``. Leaves: rows with their outcome, and counts and
hashes for each window. Start at ``expect.py``.
"""
