"""FP8 codes of queries and activations."""
