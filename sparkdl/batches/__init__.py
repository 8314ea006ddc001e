"""Stage 2 of 5: shards in, batches of tensors out, in an order that does not depend on the world size."""
