"""A byte-level GPT trained on the Python standard library, on any number of ranks: a demo."""
