# To read what transformers has, a type checker reads all of its models: half of `make lint`.
from typing import Any

def __getattr__(name: str) -> Any: ...
