"""What works around other projects, one file each, with its version, its measured gain, and when it can go.

Nothing in here is needed for a right result: take a file away, and sparkdl is slower, a message is worse, a model of
parametrized layers is refused, or a rank dies once in a while.
"""
