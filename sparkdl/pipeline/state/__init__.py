"""What a pipeline remembers, and what of it is stale.

Enters: a valid pipeline file. Leaves: what the next run finds. Neither Spark nor torch is loaded for it. Start at
``run.py``, which says what a run works with, then ``receipts.py`` and ``evaluator.py``; ``lease.py`` says who may
commit.
"""
