"""Stage 4 of 6: batches and a model in, a trained model, its history and its checkpoints out.

``trainer.py`` is a training from its first step to its result: start there. Where model and gradients live, and the
forward and backward pass with it, is for ``strategies/`` to say; ``own_step.py`` is the step of a user who owns
backward() and step() himself. ``objective/`` turns outputs and labels into a loss and metrics, ``checkpoint/`` keeps
the state, ``telemetry/`` tells of it.
"""
