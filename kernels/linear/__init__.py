"""Linear layers with FP8 block-scaled or float weights."""
