"""What a run knows and leaves: its context, results of steps by key, the lease, the record.

Enters: a sound pipeline file. Leaves: what the next run finds. Neither Spark nor torch is loaded for it. Start at
``context.py``, then ``steps.py`` and ``keys.py``, which say when a step need not be done again. ``lease.py`` says who
may commit.
"""
