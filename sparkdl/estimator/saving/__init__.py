"""Saving and loading the estimator and its model, alone and inside Spark's pipelines.

Enters: a stage. Leaves: Spark's metadata, a bundle, and its other objects as JSON and tensors, in a pickle only where
nothing else can hold them; from these the stage again, without running anything that its reader has not allowed.
Start at ``persistence.py``; ``saved.py`` and ``objects.py`` hold the objects, ``artifacts.py`` the files.
"""
