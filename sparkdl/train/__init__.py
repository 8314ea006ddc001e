"""Stage 4 of 5: batches and a model in, a trained model, its history and its checkpoints out."""
