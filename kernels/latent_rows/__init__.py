"""Latent rows: quantise, write, gather."""
