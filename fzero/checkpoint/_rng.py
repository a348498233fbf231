"""The states of this process's random generators, as JSON and back.

torch    of the CPU, and of the current CUDA device once CUDA is in use
python   of the module `random`
numpy    of numpy's own generator, if numpy was imported
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.everywhere import damaged


def rng_file(rank: int) -> str:
    """Return the name of the file with the generators of a rank."""
    return f"rng-{rank:05d}.json"


def generators() -> dict[str, Any]:
    """Return the states of all generators of this process, as they give them."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    return found


def rng_text(found: Mapping[str, Any] | None = None) -> str:
    """Return the states of all generators: those of this process, or what `generators` returned."""
    texts = dict(generators() if found is None else found)
    for name in texts.keys() & {"torch", "cuda"}:
        texts[name] = _text(texts[name])
    if "numpy" in texts:
        kind, keys, *rest = texts["numpy"]
        texts["numpy"] = [kind, keys.tolist(), *rest]
    return json.dumps(texts)


def rng_setter(text: str, where: object) -> Callable[[], None]:
    """Return what sets the generators to the states of `text`; nothing is set yet.

    Raises `CheckpointError` unless every state is one that its generator takes.
    """
    try:
        found = json.loads(text)
        cpu, version_and_words = _bytes(found["torch"]), found["python"]
        python = (version_and_words[0], tuple(version_and_words[1]), version_and_words[2])
        torch.Generator().set_state(cpu)
        random.Random().setstate(python)
        numpy = sys.modules.get("numpy") if "numpy" in found else None
        if numpy is not None:
            kind, keys, *rest = found["numpy"]
            numpy_state = (kind, numpy.array(keys, "uint32"), *rest)
            numpy.random.RandomState().set_state(numpy_state)
        cuda = _bytes(found["cuda"]) if "cuda" in found and torch.cuda.is_available() else None
        if cuda is not None:
            torch.Generator("cuda").set_state(cuda)
    except Exception as error:  # of another program: anything can be wrong with it
        seen = f"{type(error).__name__}: {error}"
        raise damaged(where, f"has no states of random generators: {seen:.200}") from None

    def set_all() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return set_all


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _bytes(text: str) -> Tensor:
    values = list(base64.b64decode(text, validate=True))
    return torch.tensor(values, dtype=torch.uint8, device="cpu")
