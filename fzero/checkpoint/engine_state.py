"""What an engine has outside of its state: buffers, param-group options, random generators.

Of generators the states are saved as JSON:

    torch    of the CPU, and of the current CUDA device once CUDA is in use
    python   of the module `random`
    numpy    of numpy's own generator, if numpy was imported
"""

from __future__ import annotations

import base64
import json
import random
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.checkpoint._pieces import TensorPiece, blocks
from fzero.checkpoint.collective import CheckpointError, damaged
from fzero.context.device import accelerator, accelerator_in_use
from fzero.errors import LayoutError
from fzero.machine.named_shards import leaf_paths
from fzero.state import TrainState
from fzero.state.setup import NO_OPTIONS

Buffers = dict[str, Tensor]
_PLAIN = (bool, int, float, str)
RNG = "rng-{:05d}.json"
"""The name of the file with the generators of a rank."""


class EngineLike(Protocol):
    """The interface of an engine that a checkpoint needs: state, module, optimizer."""

    module: nn.Module

    @property
    def state(self) -> TrainState:
        """The train state."""
        ...

    @state.setter
    def state(self, state: TrainState) -> None: ...

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch.optim optimizer, if it has one."""
        ...


def idle(engine: EngineLike) -> EngineLike:
    """Return a view of an engine, to be saved, without gradients that wait for an update."""
    state = engine.state.without_gradients()
    view: Any = SimpleNamespace(module=engine.module, optimizer=engine.optimizer, state=state)
    return view


def buffers_of(module: nn.Module) -> Buffers:
    """Return the buffers that `module.state_dict()` has, by path: the module's own."""
    found = {}
    for prefix, child in module.named_modules():
        for name, value in child._buffers.items():
            if value is not None and name not in child._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = value.detach()
    return found


def facts_of(buffers: Buffers) -> dict[str, tuple[str, int]]:
    """Return {path: (shape and dtype, crc32 of the values)}."""
    found: dict[str, tuple[str, int]] = {}
    for path, value in buffers.items():
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        found[path] = form_of(value), zlib.crc32(data)
    return found


def differing_buffers(told: Sequence[Mapping[str, tuple[str, int]]]) -> dict[str, dict[str, str]]:
    """Return {path: {rank: shape and dtype}}, with the ranks whose values are not rank 0's.

    Example:
        >>> differing_buffers([{"mean": ("(2,) torch.float32", 5)}] * 2)
        {'mean': {'0': '(2,) torch.float32'}}
    """
    found: dict[str, dict[str, str]] = {}
    for rank, facts in enumerate(told):
        for path, (form, crc) in facts.items():
            if rank == 0 or told[0].get(path) != (form, crc):
                found.setdefault(path, {})[str(rank)] = form
    return found


def buffer_pieces(
    buffers: Buffers, saved: Mapping[str, Mapping[str, str]], rank: int
) -> list[TensorPiece]:
    """Return the buffers that `rank` writes: those that differ from rank 0's."""
    return [
        piece
        for path, value in buffers.items()
        if str(rank) in saved[path]
        for piece in blocks(f"buffers/{rank}/{path}", value.reshape(-1))
    ]


def blank_buffers(
    module: nn.Module,
    saved: Mapping[str, Mapping[str, str]],
    rank: int,
    same_ranks: bool,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[Buffers, list[TensorPiece]]:
    """Return empty buffers, by path, and the pieces to fill them by.

    On as many ranks as have saved, each rank gets its own; else all get those of rank 0. Without
    saved buffers, which a state alone has none of, there is nothing to fill. shapes: of a partial
    load: the saved ones of what has another shape here; what is not in both is left out.

    Raises `LayoutError`, naming the buffer, for those of another module.
    """
    found, pieces = Buffers(), list[TensorPiece]()
    here = buffers_of(module) if saved else {}
    for path in sorted({*saved, *here} if shapes is None and saved else {*saved} & {*here}):
        forms = saved.get(path, {})
        source = str(rank) if same_ranks and str(rank) in forms else "0"
        form, other = form_of(here[path]) if path in here else "nothing", (shapes or {}).get(path)
        if other is None and forms.get(source, "nothing") != form:
            raise LayoutError(
                f"load: the buffer {path} is {forms.get(source, 'nothing')} in the checkpoint, "
                f"{form} in the module.",
                cause="another module.",
                fix="make the engine from the module that was saved. Nothing was changed.",
            )
        shape = here[path].shape if other is None else other
        value = found[path] = torch.empty(shape, dtype=here[path].dtype, device="cpu")
        if value.numel():
            name, flat = f"buffers/{source}/{path}", value.reshape(-1)
            pieces.append(TensorPiece(name=name, start=0, numel=flat.numel(), values=flat))
    return found, pieces


@torch.no_grad()
def set_buffers(module: nn.Module, values: Buffers) -> None:
    """Write values into the module's buffers."""
    here = buffers_of(module)
    for path, value in values.items():
        here[path].copy_(value)


def options_of(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Return the options of each param group that JSON can hold: what a scheduler changes."""
    return [plain_options(group) for group in ([] if optimizer is None else optimizer.param_groups)]


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group that are numbers, strings, None, or several of them."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        each: Any = value if isinstance(value, tuple | list) else () if value is None else (value,)
        if name not in NO_OPTIONS and all(isinstance(one, _PLAIN) for one in each):
            found[name] = value
    return found


def group_names(state: TrainState) -> list[list[str]]:
    """Return the names of what learns in each param group of a state's optimizer."""
    layout = state.setup.layout
    groups = state.setup.optimizer.param_groups(layout.leaves, int(state.step))
    pairs = list(zip(leaf_paths(layout), groups.of_leaf, strict=True))
    return [[name for name, k in pairs if k == number] for number in range(len(groups.options))]


def options_by_name(
    saved: Sequence[dict[str, Any]], theirs: Sequence[Sequence[str]], state: TrainState
) -> list[dict[str, Any]]:
    """Return the options of each param group here: those that its parameters had.

    saved: none of an engine with a rule. theirs: the names in each group that was saved; without
    them, of an earlier version, a group has the options of its place.

    Raises `LayoutError` for a group of which the file has two halves.
    """
    of_name = {name: k for k, names in enumerate(theirs) for name in names}
    ours, found = group_names(state), list[dict[str, Any]]()
    if not saved or of_name.keys().isdisjoint(name for names in ours for name in names):
        return [*saved]
    for number, names in enumerate(ours):
        some = {of_name[name]: name for name in names if name in of_name}
        one = min(some, default=number)
        for other, name in some.items():
            if saved[other] != saved[one]:
                differing = [k for k, x in saved[one].items() if saved[other].get(k) != x]
                raise LayoutError(
                    f"load: {some[one]} and {name} are in one param group here, and in two of the "
                    f"checkpoint, with another {', '.join(differing)}.",
                    cause="an optimizer that was made with other param groups.",
                    fix="make it with those that were saved. Nothing was changed.",
                )
        found.append(saved[one] if one < len(saved) and (some or len(saved) == len(ours)) else {})
    return found


def set_options(optimizer: Optimizer | None, saved: Sequence[dict[str, Any]]) -> None:
    """Set options as `optimizer.load_state_dict` does; those of other groups are left out."""
    groups = [] if optimizer is None else optimizer.param_groups
    if len(groups) != len(saved):
        return
    for group, options in zip(groups, saved, strict=True):
        for name, value in options.items():
            old = group.get(name)
            if isinstance(old, Tensor):
                old.fill_(value)
            elif name not in NO_OPTIONS:
                group[name] = tuple(value) if isinstance(value, list) else value


def require_options(optimizer: Optimizer | None, saved: Sequence[dict[str, Any]]) -> None:
    """Raise `CheckpointError` for options that the optimizer's groups cannot have."""
    groups = [] if optimizer is None else optimizer.param_groups
    for number, (group, options) in enumerate(zip(groups, saved, strict=False)):
        plain = plain_options(options)
        for name, value in options.items():
            number_wanted = isinstance(group.get(name), Tensor | float)
            if name not in plain or (number_wanted and not isinstance(value, int | float)):
                raise CheckpointError(
                    f"load: option {name} of param group {number} is {value!r:.80}.",
                    cause="a manifest that another program wrote.",
                    fix="use another copy of the checkpoint. Nothing was changed.",
                )


def form_of(value: Tensor) -> str:
    """Return what a manifest says of a buffer."""
    return f"{tuple(value.shape)} {value.dtype}"


def generators() -> dict[str, Any]:
    """Return the states of all generators of this process, as they give them."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (kind := accelerator_in_use()) is not None:
        found[kind] = torch.get_device_module(kind).get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    return found


def rng_text(found: Mapping[str, Any] | None = None) -> str:
    """Return the states of all generators: those of this process, or what `generators` returned."""
    texts = dict(generators() if found is None else found)
    for name, state in texts.items():
        if isinstance(state, Tensor):  # of the CPU, and of an accelerator by its type
            texts[name] = base64.b64encode(bytes(state.tolist())).decode()
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
        for name in found.keys() - {"python", "numpy"}:
            state = list(base64.b64decode(found[name], validate=True))
            found[name] = torch.tensor(state, dtype=torch.uint8, device="cpu")
        cpu, (version, words, gauss) = found["torch"], found["python"]
        python = (version, tuple(words), gauss)
        torch.Generator().set_state(cpu)
        random.Random().setstate(python)
        numpy = sys.modules.get("numpy") if "numpy" in found else None
        if numpy is not None:
            kind, keys, *more = found["numpy"]
            numpy_state = (kind, numpy.array(keys, "uint32"), *more)
            numpy.random.RandomState().set_state(numpy_state)
        there = found.get(kind := accelerator())
        if there is not None:
            torch.Generator(kind).set_state(there)
    except Exception as error:  # of another program: anything can be wrong with it
        seen = f"{type(error).__name__}: {error}"
        raise damaged(where, f"has no states of random generators: {seen:.200}") from None

    def set_all() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if there is not None:
            torch.get_device_module(kind).set_rng_state(there)

    return set_all
