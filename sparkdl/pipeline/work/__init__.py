"""What the steps need to make their part: statistics, labels, shards, trainings, measurements.

Enters: rows, the sections of a file. Leaves: features, shard sets, bundles, verdicts. Nothing here knows what is stale.
"""
