"""Saving and loading the estimator and its model, alone and inside Spark's pipelines.

A stage enters; Spark's metadata, a bundle, and its other objects as JSON and tensors leave, in a pickle only where
nothing else can hold them; from these the stage again, without running anything that its reader has not allowed. Start
at ``persistence.py``; ``artifacts.py`` has the files of the objects, ``objects.py`` their form in JSON.
"""
