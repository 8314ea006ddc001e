"""How good predictions are: exact metrics over held-out rows, whole, by slice, and resampled for the gate.

Enters: arrays of labels, predictions, weights and groups. Leaves: numbers by name, and a sentence for each that is
undefined. The way: ``rows.py`` (checked arrays) -> ``sums.py`` (what adds up) and ``ranking.py`` (what needs the order
of the rows), each also over bootstrap draws -> ``measure.py``. Pure numpy.
"""
