"""The disk tier of a node: a file of slabs that survives restarts, its bookkeeping, and when to stop using it."""
