"""Shared by the integrations: from a model to its engine, saving of engines, refusals."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fzero import checkpoint
from fzero.adapter import Engine, gathered
from fzero.checkpoint.elements import fill_module, local_states, values_by_path
from fzero.checkpoint.engine_state import buffers_of, idle, options_of, set_buffers, set_options
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError
from fzero.machine.placeholder import LazyParam
from fzero.state import TrainState
from fzero.transforms.state_entries import entries_of, has_values, with_entries

FOLDER = "fzero"
"""Folder of the first model and its optimizer, inside of the folder of a checkpoint."""


def engine_of(engines: Iterable[Engine], x: Any) -> Engine | None:
    """Return the open engine of a model, which may be compiled, or of an optimizer, or None."""
    x = getattr(x, "_orig_mod", x)
    found = (e for e in engines if not e.closed and (x is e.module or x is e.optimizer))
    return next(found, None)


def options_given(given: Mapping[str, Any], accumulates: str, clips: str) -> dict[str, Any]:
    """Return options of engines; refuse those that a client has a word of its own for.

    It makes one update with each `step()`, and clears gradients after it, so that an engine that
    counts micro-batches would never update.
    """
    for name in ("micro_batches", "gradient_accumulation_steps", "average_micro_batches"):
        if name in given:
            raise refusal(f"the option {name}={given[name]!r} of the engine", f"use {accumulates}")
    if given.get("max_norm") is not None:
        raise refusal(f"the option max_norm={given['max_norm']!r} of the engine", f"use {clips}")
    return dict(given)


class Waiting:
    """Trainable models that have no engine yet, because their optimizers are not known.

    A forward under autograd raises until then: nothing would reduce its gradients.
    """

    def __init__(self) -> None:
        self._hooks: dict[nn.Module, RemovableHandle] = {}

    def add(self, model: nn.Module) -> None:
        """Register a model, unless all of its parameters are frozen."""
        model = getattr(model, "_orig_mod", model)
        if model not in self._hooks and any(p.requires_grad for p in model.parameters()):
            self._hooks[model] = model.register_forward_pre_hook(_refuse_to_learn)

    def pop(self, optimizer: Optimizer) -> nn.Module:
        """Remove and return the registered model whose parameters `optimizer` steps."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = [x for x in self._hooks if stepped <= {id(p) for p in x.parameters()}]
        if not self._hooks:
            raise refusal(
                "an optimizer that is set up before its model",
                "set the model up first, or both in one call: prepare(model, optimizer)",
                cause="the other order, which does for DDP; or a second optimizer of one model.",
            )
        if len(models) != 1:
            known = {id(p) for model in self._hooks for p in model.parameters()}
            raise refusal(
                f"an optimizer whose parameters are not all of one model, of the "
                f"{len(self._hooks)} that wait for an optimizer ({len(stepped - known)} of its "
                f"{len(stepped)} parameters are of none of them)",
                "give each model one optimizer, with several param groups if need be, and set the "
                "model up with it or before it; for one optimizer of two modules, make them parts "
                "of one nn.Module; where a loss has a model of its own that does not learn (a "
                "guide), loss.guide.requires_grad_(False) before the trainer is made",
                cause="an optimizer of two modules, or of a loss that has weights of its own.",
            )
        self._hooks.pop(models[0]).remove()
        return models[0]


class OfModel:
    """The attribute `no_sync` of a model with an engine: it holds the engine, and raises.

    Who makes another engine of the model closes this one, whose trainer may be gone, unless it is
    `in_use`. A copy of the model has none.
    """

    def __init__(
        self, engine: Engine | None = None, in_use: Callable[[], bool] = lambda: False
    ) -> None:
        self.engine, self.in_use = engine, in_use

    def __reduce__(self) -> Any:
        return OfModel, ()

    def __call__(self) -> Any:
        """Raise: what is to be called instead knows the engine."""
        raise refusal(
            "model.no_sync(), of DistributedDataParallel, which accelerate's LocalSGD calls",
            "use accelerator.accumulate(model) or accelerator.no_sync(model); in the place of "
            "LocalSGD(..., local_sgd_steps=n) the option local=fzero.Local(every=n) of the engine",
        )


def close_earlier(model: nn.Module, but: Iterable[Any] = ()) -> None:
    """Close the engines that earlier trainers have made of a model, or of parts. A collective.

    The model is then an ordinary one, with the values that it was trained to.
    """
    for part in [*model.modules()]:
        held = vars(part).get("no_sync")
        if isinstance(held, OfModel) and not held.in_use() and held.engine not in but:
            for name in ("no_sync", "generate"):
                vars(part).pop(name, None)
            if held.engine is not None:
                held.engine.close()


def _refuse_to_learn(model: nn.Module, _: Any) -> None:
    if torch.is_grad_enabled():
        raise refusal(
            f"a forward, with gradients, of a {type(model).__name__} that learns and whose "
            "optimizer was not set up",
            "set up the optimizer with its model, or after it; for a model that does not learn, "
            "torch.no_grad() or model.requires_grad_(False)",
        )


def clip(engine: Engine, max_norm: float, norm_type: float) -> Tensor:
    """`engine.clip_grad_norm_`, or torch's function for another norm. A collective."""
    if float(norm_type) != 2.0:
        return nn.utils.clip_grad_norm_(engine.parameters(), max_norm, norm_type)
    return engine.clip_grad_norm_(max_norm)


def save(path: Any, engine: Engine) -> None:
    """Save a model and its optimizer, without the gradients that wait for an update.

    Random generators are left out, too: the libraries save them. So is the base of PEFT's models,
    which is where it came from. A collective.
    """
    checkpoint.save(path, idle(engine), rng=False, frozen=not _is_of_peft(engine.module))


def save_engines(folder: Any, engines: Sequence[Engine]) -> None:
    """Save engines to `folder`/fzero, fzero_1, ... A collective."""
    for path, engine in _paths(folder, engines):
        save(path, engine)


def load_engines(folder: Any, engines: Sequence[Engine]) -> None:
    """Load what `save_engines` has saved. A collective."""
    for path, engine in _paths(folder, engines):
        checkpoint.load(path, engine, rng=False)


def adopt(path: Any, engine: Engine, made: TrainState, *, model: bool, optimizer: bool) -> None:
    """Give an engine what `path` has of its model, of its optimizer, or of both.

    made: the state that was loaded from there. The values of parameters, and their masters, are the
    model's; moments, counts and slots the optimizer's.
    """
    now, held = engine.state.without_gradients(), engine.optimizer
    buffers = {name: x.clone() for name, x in buffers_of(engine.module).items()}
    options = options_of(held)
    if not (model and optimizer):
        base, values = (now, made) if model else (made, now)
        entries = entries_of(values, engine.state.setup.axis.rank)
        made = with_entries(base, [one for one in entries if has_values(one)])
    fill_module(path, engine, engine.axis.rank, engine.axis.size)
    if not model:
        set_buffers(engine.module, buffers)
    if not optimizer:
        set_options(held, options)
    engine.state = made


def _paths(folder: Any, engines: Sequence[Engine]) -> list[tuple[str, Engine]]:
    names = [f"{FOLDER}_{i}" if i else FOLDER for i in range(len(engines))]
    return [(os.path.join(folder, name), x) for name, x in zip(names, engines, strict=True)]


@contextmanager
def whole(engine: Engine | None, *, modify: bool = False) -> Iterator[None]:
    """Gather the full parameters to the CPU for the block. Entering is a collective.

    One rank alone may then save, or compute with parts of the module. Tied parameters stay one
    tensor. Below stage 3 the parameters are full anyway, but for encoded ones. With `modify`, all
    ranks may write to them, as `load_state_dict()` does, and leaving is a collective, too. None: do
    nothing. Of PEFT's models those that a file of its adapters has: the base stays as it is.
    """
    with ExitStack() as stack:
        if engine is not None and modify:
            names = _adapters_of(module := engine.module)
            named = module.named_parameters()
            some = [p for name, p in named if names is None or name in names]
            stack.enter_context(gathered(some, modify=True))
        elif engine is not None and any(isinstance(p, LazyParam) for p in engine.parameters()):
            names, held = _adapters_of(engine.module), local_states("save", engine)
            assert_same_everywhere(
                [f"of {names and sorted(names)}"], held.processes.axis, what="whole"
            )
            stack.enter_context(_having(engine.module, values_by_path(held, names)))
        yield


def _is_of_peft(module: nn.Module) -> bool:
    return "peft" in sys.modules and isinstance(module, sys.modules["peft"].PeftModel)


def _adapters_of(module: nn.Module) -> set[str] | None:
    """Return the parameters that a model of PEFT learns or saves; None for any other model."""
    if not _is_of_peft(module):
        return None
    model: Any = module
    values, saved = model.state_dict(keep_vars=True), set[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says again what it says when it saves
        for name, config in model.peft_config.items():
            if not config.is_prompt_learning:  # what it saves is computed from what learns
                some = sys.modules["peft"].get_peft_model_state_dict(model, values, name)
                saved |= set(map(id, some.values()))
    return {name for name, p in model.named_parameters() if p.requires_grad or id(p) in saved}


@contextmanager
def _having(module: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Replace parameters of a module by `values`."""
    named = module.named_parameters(remove_duplicate=False)
    shards = {path: p for path, p in named if path in values}
    full = {p: nn.Parameter(values[path], p.requires_grad) for path, p in shards.items()}
    _assign(module, {path: full[p] for path, p in shards.items()})
    try:
        yield
    finally:
        _assign(module, shards)


def _assign(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    for path, p in parameters.items():
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, p)


def refusal(seen: str, fix: str, *, cause: str = "a script for another backend.") -> LayoutError:
    """Return the error for a request that another backend would serve."""
    return LayoutError(f"{seen}: not with fzero.", cause=cause, fix=f"{fix}.")
