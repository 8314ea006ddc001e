"""What a run does, step by step: ingest, features, shards, training, evaluation, publication, predictions.

Enters: the context of a run and a session. Leaves: tables, a published model, predictions. Start at ``work.py``, which
goes through the steps in order.
"""
