"""What the integrations share: which model is an engine's, saving it, and what they refuse."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fzero import checkpoint
from fzero.adapter import Engine, gathered
from fzero.errors import LayoutError, explain

FOLDER = "fzero"
"""What the first model and its optimizer are saved to, inside of the folder of a checkpoint."""


def model_of(model: nn.Module) -> nn.Module:
    """Return the module itself of one that torch.compile has wrapped."""
    return getattr(model, "_orig_mod", model)


def parameters_of(model: nn.Module) -> tuple[set[int], set[int]]:
    """Return the ids of all parameters, and of those that learn."""
    every = list(model.parameters())
    return {id(p) for p in every}, {id(p) for p in every if p.requires_grad}


def only_model(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the model whose parameters an optimizer steps; refuse one of several, or of none."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [x for x in models if stepped & parameters_of(x)[0]]
    if len(found) != 1 or not stepped <= parameters_of(found[0])[0]:
        raise refused(
            f"an optimizer of parameters that are not all of one model, of {len(models)} given",
            "set up each model together with an optimizer of its own; for one optimizer of two "
            "modules, make them parts of one nn.Module",
        )
    return found[0]


def backward(engines: Sequence[Engine], loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Differentiate a loss of these engines; only one alone may have a loss scale."""
    if not engines:
        raise refused("a backward before the setup", "set up the model and its optimizer first")
    if len(engines) > 1 and any(engine.needs_scaler() for engine in engines):
        raise refused(
            f"a loss of {len(engines)} models, each of which has a loss scale of its own",
            "say whose loss it is: engine_of(model).backward(loss)",
        )
    engines[0].backward(loss, *args, **kwargs)


def save_engines(folder: Any, engines: Sequence[Engine]) -> None:
    """Save engines to `folder`/fzero, fzero_1, ... without random generators. A collective."""
    for path, engine in _paths(folder, engines):
        checkpoint.save(path, engine, rng=False)


def load_engines(folder: Any, engines: Sequence[Engine]) -> None:
    """Load what `save_engines` has saved. A collective."""
    for path, engine in _paths(folder, engines):
        checkpoint.load(path, engine, rng=False)


def _paths(folder: Any, engines: Sequence[Engine]) -> list[tuple[str, Engine]]:
    names = [f"{FOLDER}_{i}" if i else FOLDER for i in range(len(engines))]
    return [(os.path.join(folder, name), x) for name, x in zip(names, engines, strict=True)]


@contextmanager
def whole(engine: Engine, *, modify: bool = False) -> Iterator[None]:
    """In the block `state_dict()` of the module, and of each part, has whole values on the CPU.

    A collective, and then none: one rank alone may save. Tied parameters stay one tensor. Below
    stage 3 the values are whole as they are. With `modify`, `load_state_dict()` works instead.
    """
    with ExitStack() as stack:
        if modify:
            stack.enter_context(gathered(engine.module, modify=True))
        elif engine.stage == 3:
            values = checkpoint.state_dict(engine)
            for path, part in engine.module.named_modules():
                handle = part.register_state_dict_post_hook(_filling(values, path))
                stack.callback(handle.remove)
        yield


def _filling(values: dict[str, Tensor], path: str) -> Callable[..., None]:
    """A hook that puts `values` in the place of the parameters that the part at `path` owns."""

    def fill(part: nn.Module, found: dict[str, Any], prefix: str, _: Any) -> None:
        for name, p in part._parameters.items():
            if p is not None:
                found[prefix + name] = values[f"{path}.{name}" if path else name]

    return fill


def refused(seen: str, fix: str) -> LayoutError:
    """Return the error for what a script asks of another backend."""
    return LayoutError(
        explain(f"{seen}: not with fzero.", cause="a script for another backend.", fix=f"{fix}.")
    )
