"""Benchmark of kernels: floors from ceilings measured in the same run, medians by events, JSON out."""
