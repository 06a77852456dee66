"""Training of the nano model: corpus, tokenizer, trainable model, schedule, FP8 export and report.

Nothing in here is imported at serving time.
"""
