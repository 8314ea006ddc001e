"""What a pipeline remembers, and what of it is stale.

Enters: a sound pipeline file. Leaves: what the next run finds. Neither Spark nor torch is loaded for it. Start at
``receipts.py``, then ``evaluator.py``; ``lease.py`` says who may commit.
"""
