"""Engines for scripts written for other libraries. `import fzero` loads only `deepspeed`.

deepspeed       `initialize` with a DeepSpeed config, and DeepSpeed's methods and functions
accelerate      for Hugging Face accelerate; `transformers` for the trainers that are built on it
fabric          for Lightning Fabric

In: their configs and calls. Out: an engine that they drive. What it cannot do raises an error.
"""
