"""The telemetry of a run while it trains.

Enters: the run and the loss of each batch. Leaves: rows of the history with the loss of the global batch
(``window.py``, start there: it is also where ranks agree to stop); progress events and TensorBoard files
(``report.py``).
"""
