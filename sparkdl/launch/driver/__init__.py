"""The driver's side of a launch: checks before it, starts the ranks, watches them, names the one at fault."""
