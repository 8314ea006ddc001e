"""The rank's side of a launch: registers, waits for all, runs the function, reports.

How to reach the driver comes in; the function's value, its error, its output and signs of life go out over the link.
Start at ``rank.py``; ``link.py`` is its connection, ``capture.py`` its output, ``resources.py`` its GPUs and threads.
"""
