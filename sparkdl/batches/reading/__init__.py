"""Batches of tensors, read from mapped blocks by row numbers.

Enters: an order and the memory that blocks lie in. Leaves: batches. Start at ``loader.py``; ``reader.py`` is
its pipeline of one epoch: ``windows.py`` makes rows known, ``gather.py`` copies them, ``geometry.py`` says how much
memory all that takes, ``explain.py`` tells it beforehand.
"""
