"""Products for NVIDIA Hopper, written in Gluon: explicit tensor-core instructions, copy engine and warp roles."""
