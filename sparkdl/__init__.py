"""sparkdl: from a Spark DataFrame to a trained PyTorch model and back to the lakehouse."""
