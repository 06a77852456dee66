"""One module per command of `headrace`; `headrace.cli` loads the one that is called."""
