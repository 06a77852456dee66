"""Sub-commands of `headrace lab`."""
