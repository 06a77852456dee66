"""What `headrace model eval nano` measures: the shipped checkpoint on shipped text that it was not trained on."""
