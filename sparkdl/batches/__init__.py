"""Stage 2 of 5: shards to batches, at memory speed, in an order that never depends on the world size."""
