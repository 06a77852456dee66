"""Sampling of one row of logits."""
