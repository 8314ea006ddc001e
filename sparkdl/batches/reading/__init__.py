"""From row numbers and mapped blocks to batches of tensors.

Enters: an order and the memory that blocks lie in. Leaves: batches. Start at ``loader.py``.
"""
