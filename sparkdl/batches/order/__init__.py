"""Which rows make up which step on which rank: pure arithmetic over plain counts, without torch, pyarrow or a disk.

Enters: rows per shard, seed, epoch, world. Leaves: row numbers. Start at ``plan.py``.
"""
