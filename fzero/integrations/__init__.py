"""Engines for scripts written for other libraries. What they need is imported with them.

deepspeed       `initialize` with a DeepSpeed config, and DeepSpeed's methods and functions
accelerate      for Hugging Face accelerate; `transformers` for the trainers that are built on it
peft            adapters of PEFT as states over one base, and its files
fabric          for Lightning Fabric

In: their configs and calls. Out: an engine that they drive. What it cannot do raises an error.
"""

import importlib
import typing

from fzero.context import lazy_import

# First, whichever is imported first: the adapter has a name of deepspeed, which is made of it.
importlib.import_module("fzero.adapter")

if typing.TYPE_CHECKING:  # what `__getattr__` imports
    from fzero.integrations import deepspeed as deepspeed
else:
    __getattr__ = lazy_import.importer(__name__, ["fzero.integrations.deepspeed"])
