"""Stage 4 of 6: batches and a model in, a trained model, its history and its checkpoints out.

``loop.py`` is the way of a run from its first epoch to its last: start there. ``step.py`` is one optimizer step,
``objective/`` turns outputs and labels into a loss and metrics, ``checkpoint/`` keeps the state, ``telemetry/`` tells
of it. Where model and gradients live is for ``strategies/`` to say. ``manual.py`` is the step of a user who owns
backward() and step() himself.
"""
