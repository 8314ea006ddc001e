"""Typed features: raw columns to model inputs, one implementation for training and for serving.

Enters: record batches of raw, readable columns, and what the user wrote of each feature. Leaves: record batches of
model inputs: ``numbers``, ``categories``, and one column for every list, text, vector and image. No Spark, no torch.
``spec.py`` says what can be chosen; start there.
"""
