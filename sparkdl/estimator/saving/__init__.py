"""Saving and loading the estimator and its model, alone and inside Spark's pipelines. Start at ``persistence.py``."""
