"""The parameters of the estimator: one table that the code, the help texts and the documentation are made from.

Start at ``spec.py``.
"""
