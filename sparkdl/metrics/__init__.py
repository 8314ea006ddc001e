"""Metrics, each in one place: for the epochs of a training, for the gate that judges a model, for the report.

Enters: labels, predictions or what was chosen, weights and groups of rows, as numpy arrays. Leaves: numbers by name,
and a sentence for each that is undefined. ``sums.py`` has what adds up over rows, batches and ranks, ``ranking.py``
what needs the order of all rows, both also over bootstrap draws; ``measure.py`` computes all of a task over checked
rows (``rows.py``). Without torch and without Spark.
"""
