"""Stage 5 of 5: a trained model in, versions, aliases, tables and predictions out."""
