"""Gradients of a backward pass to their means over the ranks, while the backward pass goes on.

Enters: ``.grad`` of each parameter as autograd fills it. Leaves: the same gradients, averaged over the ranks.
The way: ``reducer.py`` (when a gradient leaves) -> ``buckets.py`` (with which others) -> ``carrier.py`` (the backend's
all-reduce) or ``shared_memory.py`` -> ``.grad``. Aside: ``sparse.py`` for embeddings,
``batch_norm.py`` and ``buffers.py`` for what a forward pass shares. Start at ``Reducer.synchronize``.
"""
