"""One fit on the driver: prepare, check, launch, collect. Start at ``fit.py``."""
