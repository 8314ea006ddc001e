"""Gradients of a backward pass to their means over the ranks, while the backward pass goes on.

Enters: ``.grad`` of each parameter as autograd fills it. Leaves: the same tensors, averaged. Start at ``reducer.py``.
"""
