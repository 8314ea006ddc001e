"""The state of a run on a disk, so that it goes on exactly where it was.

Enters: model, optimizer, schedule, random number generators, position in the data. Leaves: checkpoints, whole or not
there, and the same state put back. Start at ``checkpoint.py``.
"""
