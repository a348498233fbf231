"""The main job: a byte-level GPT trained on the Python standard library, on any number of ranks."""
