"""Stage 3 of 5: gradients of each rank in, gradients all ranks agree on out."""
