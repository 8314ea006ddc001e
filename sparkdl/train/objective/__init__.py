"""Outputs and labels to numbers: the loss whose mean over ranks is exact, and metrics over all rows.

Enters: a model's outputs, labels, weights. Leaves: a scalar to run backward from, and metrics of an epoch. Start at
``loss.py``; ``labels.py`` says what a loss takes, ``metrics.py`` adds up over batches and ranks what
``named_metrics.py`` or the user asks for.
"""
