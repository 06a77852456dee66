"""CUDA C++ for Hopper: building, loading and launching. Kernels lie beside the ops they serve."""
