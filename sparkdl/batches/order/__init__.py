"""The rows of each step on each rank: pure arithmetic over plain counts, without torch, pyarrow or a disk.

Enters: rows per shard, seed, epoch, world. Leaves: row numbers. Start at ``plan.py``: blocks are dealt to
lanes, lanes shuffled by windows (``permutations.py``), steps cut from all lanes (``patterns.py`` for many steps at
once). ``quality.py`` measures how well an order is shuffled.
"""
