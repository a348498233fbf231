"""A DeepSpeed-style config, read as the options of an engine."""

from fzero.adapter.deepspeed._initialize import initialize as initialize
