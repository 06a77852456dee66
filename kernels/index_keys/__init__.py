"""Index keys: quantise, planar write, gather."""
