"""A copy of a module for each call, with the tensors of that call in place of its own.

A copy is alive as long as somebody will run it again: a checkpoint inside the module does so in
backward, and then finds the parameters of its own call, whatever was called in between. So nothing
must be put back after a call, and threads have nothing in common.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from fzero.errors import LayoutError

_TABLES = ("_parameters", "_buffers", "_modules", "training")  # made anew for each copy
_TORCHS = frozenset(vars(nn.Module()))  # the attributes that every module has, hooks among them


class _StandIn:
    """Stands for a module while it is tried what copies share; torch's hooks refer to it weakly."""


class _Part(NamedTuple):
    """One submodule: what its copies share, and what each copy gets anew."""

    path: str
    cls: type[nn.Module]
    shared: dict[str, Any]
    owned: dict[str, Any]  # containers, objects, bound methods: copied deeply for each call
    children: dict[str, int | None]  # attribute -> position among the parts
    parameters: dict[str, str | None]  # attribute -> first qualified name of its tensor
    buffers: dict[str, str | None]


@final
class Template:
    """A module without the memory of its parameters, from which copies are made.

    Args:
        module: the user's module: never run, never written to, and not kept alive.
        stateful: each call brings the buffers; otherwise they are constants, cloned here.
    """

    def __init__(self, module: nn.Module, *, stateful: bool) -> None:
        self._sources = [weakref.ref(part) for part in module.modules()]
        self._modes = [part.training for part in module.modules()]
        with torch.inference_mode(False), torch.no_grad():
            twin, tensors = _deepcopy(module, stateful)
        self._modules = [*twin.modules()]
        self._names: dict[int, str] = {}  # id of a tensor of the twin -> its first name
        for name, value in [*twin.named_parameters(), *twin.named_buffers()]:
            self._names.setdefault(id(value), name)
        self._tensors = tensors  # holds what the ids above and below belong to
        self.constants = {} if stateful else dict(twin.named_buffers())
        self._versions = {name: value._version for name, value in self.constants.items()}
        position = {id(part): i for i, part in enumerate(self._modules)}
        stand_ins: dict[int, Any] = {number: _StandIn() for number in position}
        stand_ins |= {id(tensor): tensor for tensor in tensors}
        self._parts = [
            self._part(path, part, position, stand_ins) for path, part in twin.named_modules()
        ]
        self._deep = any(part.owned for part in self._parts)
        constant = [] if stateful else self._modules
        self._norms = [i for i, part in enumerate(constant) if tracks(part)]
        self.modes()  # refuses norms that train

    @property
    def module(self) -> nn.Module:
        """What copies are made of: with placeholders for parameters, never run."""
        return self._modules[0]

    def modes(self) -> list[bool]:
        """Read `.training` of the user's submodules; as last read once the module is gone."""
        module = self._sources[0]()
        if module is not None:
            parts = [*module.modules()]
            if parts != [source() for source in self._sources]:
                raise LayoutError(
                    f"{type(module).__name__} gained, lost or replaced submodules.",
                    cause="the module was edited after `functionalize`.",
                    fix="call `functionalize(module)` again; use the new `apply` and `params`.",
                )
            self._modes = [part.training for part in parts]
        tracking = [self._parts[i].path for i in self._norms if self._modes[i]]
        if tracking:
            raise update_error("running statistics, being in train mode", tracking)
        return self._modes

    def bind(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> list[nn.Module]:
        """Make a copy that holds `params`, and `buffers` or the constants; the root comes first.

        Dict writes only: no tensor is touched, so they may be of any kind.
        """
        modes = self.modes()
        buffers = buffers or self.constants
        copies: list[nn.Module] = [object.__new__(part.cls) for part in self._parts]
        memo = self._memo(copies, {**params, **buffers}) if self._deep else {}
        for made, part, mode in zip(copies, self._parts, modes, strict=True):
            state = vars(made)
            for key, value in part.shared.items():  # torch 2.11 traces no update() of it
                state[key] = value
            state["training"] = mode
            state["_parameters"] = {k: n and params[n] for k, n in part.parameters.items()}
            state["_buffers"] = {k: n and buffers[n] for k, n in part.buffers.items()}
            state["_modules"] = {
                k: None if i is None else copies[i] for k, i in part.children.items()
            }
            for key, value in part.owned.items():
                state[key] = copy.deepcopy(value, memo)
        return copies

    def buffers_of(self, copies: list[nn.Module]) -> dict[str, Tensor | None]:
        """Give the buffers that a copy holds after its call, by first name; None: dropped."""
        found: dict[str, Tensor | None] = {}
        for made, part in zip(copies, self._parts, strict=True):
            now = vars(made)["_buffers"]
            for key in part.buffers | now:
                known = part.buffers.get(key)
                if known or now[key] is not None:
                    found[known or f"{part.path}.{key}".lstrip(".")] = now.get(key)
        return found

    def changed(self, copies: list[nn.Module]) -> list[str]:
        """Name the buffers that are no longer the constants, or were written to in any call."""
        counted = not torch.compiler.is_compiling()  # a count is nothing that a graph can hold
        return [
            name
            for name, value in self.buffers_of(copies).items()
            if value is None
            or value is not self.constants.get(name)
            or (counted and value._version != self._versions[name])
        ]

    def _part(
        self, path: str, module: nn.Module, position: dict[int, int], stand_ins: dict[int, Any]
    ) -> _Part:
        shared, owned = {}, {}
        for key, value in vars(module).items():
            if key in _TABLES:
                continue
            # torch's own tables of hooks are mostly empty, and then nothing is in them to copy.
            is_shared = (key in _TORCHS and not value) or (
                copy.deepcopy(value, stand_ins) is value and id(value) not in self._names
            )
            (shared if is_shared else owned)[key] = value
        if isinstance(module, nn.RNNBase):
            # On CUDA it moves the weights it is given, the caller's, into one block in place.
            shared["flatten_parameters"] = _leave_as_they_are
        names = self._names
        return _Part(
            path=path,
            cls=type(module),
            shared=shared,
            owned=owned,
            children={
                k: None if m is None else position[id(m)] for k, m in module._modules.items()
            },
            parameters={
                k: None if p is None else names[id(p)] for k, p in module._parameters.items()
            },
            buffers={k: None if b is None else names[id(b)] for k, b in module._buffers.items()},
        )

    def _memo(self, copies: list[nn.Module], given: Mapping[str, Tensor]) -> dict[int, Any]:
        """Return the memo of a deep copy: this call's tensors and modules for the template's."""
        memo: dict[int, Any] = {id(tensor): tensor for tensor in self._tensors}
        memo |= {number: given[name] for number, name in self._names.items()}
        return memo | {id(a): b for a, b in zip(self._modules, copies, strict=True)}


def call_copy(copies: list[nn.Module], args: Any, kwargs: Any) -> Any:
    """Call a copy. What `torch.nn.utils.parametrize.cached()` keeps, it keeps for this call alone.

    It is kept by the id of a module, which a copy for the next call may have again.
    """
    if not parametrize._cache_enabled:
        return copies[0](*args, **kwargs)
    before, parametrize._cache = parametrize._cache, {}
    try:
        return copies[0](*args, **kwargs)
    finally:
        parametrize._cache = before


def tracks(module: nn.Module) -> bool:
    """Whether it is a norm that updates running statistics whenever it trains."""
    return (
        isinstance(module, _NormBase)
        and module.track_running_stats
        and module.running_mean is not None
    )


def update_error(what: str, names: list[str]) -> LayoutError:
    """Say that buffers held as constants would be, or were, updated."""
    listed = ", ".join(name or "the module" for name in names[:8]) + ", ..." * (len(names) > 8)
    return LayoutError(
        f"the forward updates {what}: {listed}; here they are constants.",
        cause="BatchNorm, spectral_norm, a counter, or a cache made on first use.",
        fix="`apply, params, buffers = functionalize(module, buffers=True)`, then "
        "`out, buffers = apply(params, *args, buffers=buffers)`; or module.eval() before "
        "`functionalize(module)`.",
    )


def _deepcopy(module: nn.Module, stateful: bool) -> tuple[nn.Module, list[Tensor]]:
    """Copy a module; its parameters (if `stateful`, its buffers too) become placeholders.

    Returns the copy, and every tensor that it holds anywhere.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()  # deepcopy refuses results of autograd
    for value in module.parameters():
        memo[id(value)] = nn.Parameter(_placeholder(value), requires_grad=value.requires_grad)
    for value in module.buffers():
        memo[id(value)] = _placeholder(value) if stateful else value.detach().clone()
    try:
        twin = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise LayoutError(
            f"{type(module).__name__} cannot be copied: {error}.",
            cause="an attribute that holds a lock, an open file, a process group or a graph.",
            fix="keep it outside of the module, or define `__deepcopy__` on its class.",
        ) from error
    return twin, [value for value in memo.values() if isinstance(value, Tensor)]


def _placeholder(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _leave_as_they_are() -> None:
    """Stand in for `RNNBase.flatten_parameters`."""
