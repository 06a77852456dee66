"""Headrace: prefill and decode disaggregated around a tiered FP8 KV cache.

The rooms of the house live in top-level folders that are linked here (see docs/architecture.md for what each owns
and which may import which). This package root itself knows nothing about tensors, HTTP or processes.
"""

__version__ = "0.1.0"
