"""Index logits and the exact top-k selection."""
