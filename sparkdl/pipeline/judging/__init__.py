"""Whether a model is good enough, and whether the rows are still those it learned from: arithmetic, no Spark, no torch.

Enters: labels and predictions of held-out rows; counts of features. Leaves: a decision about a challenger, what a
report shows of it, the features that have drifted. Start at ``gate.py`` and ``drift.py``; ``metrics/`` measures.
"""
