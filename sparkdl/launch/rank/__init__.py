"""The rank's side of a launch: registers, waits for all, runs the function, reports. Start at ``rank.py``."""
