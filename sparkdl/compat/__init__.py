"""Workarounds for other projects, one file each, with version, measured gain, and when each can go.

Nothing in here is needed for a right result: take a file away, and sparkdl is slower, a message is worse, a model of
parametrized layers is refused, or a rank dies once in a while.
"""
