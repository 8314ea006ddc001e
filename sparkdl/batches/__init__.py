"""Stage 2 of 6: a shard set in, batches of tensors out, in an order that never depends on the world size.

Enters: a manifest and its files, a world, a batch size. Leaves: an iterable of ``Batch``, resumable to the row.
``order/`` says which rows make up which step (pure arithmetic), ``memory/`` where their bytes lie and whether they are
whole, ``reading/`` gathers them. Start at ``reading/loader.py``.
"""
