"""How a model is spread over the ranks: parameters, gradients and optimizer state, and what of them travels.

Enters: functions that make a model and its optimizer, then batches and an objective. Leaves: the gradients of the
global batch, and the whole state on the leader, whatever lay where. Start at ``base.py``; each other file is one way.
"""
