"""Stage 1 of 5: a Spark DataFrame in, Arrow shards and their manifest out."""
