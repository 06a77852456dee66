"""Adapters fall back to Triton for what aiter lacks, so on a CPU Triton is interpreted here too."""

import importlib.util

import torch

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    from headrace.kernels.testing import interpreter

    interpreter.install()
