"""Skeletons: private copies of a module that `apply` binds tensors to, runs and wipes.

The user's module is never run and never written to. A skeleton has placeholders without memory for
parameters, and serves one call at a time; a `Pool` lends skeletons to threads.
"""

import copy
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fzero.errors import LayoutError, explain

_T = TypeVar("_T")


class Part(NamedTuple):
    """One submodule of the user's module, as it was when it was functionalized."""

    path: str
    source: weakref.ref[nn.Module]  # weak: `apply` must not keep the module's parameters alive
    children: list[int]  # ids; every child is a part too, so none is reused unnoticed
    parameters: dict[str, str]  # attribute -> first qualified name of its tensor
    buffers: dict[str, str]
    tracks: bool  # a norm that updates running statistics whenever it trains


class _Skeleton(NamedTuple):
    """A runnable copy of the module: its submodules, and the `vars` of each before any call."""

    modules: tuple[nn.Module, ...]
    clean: tuple[dict[str, Any], ...]

    def bind(
        self, parts: list[Part], params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        """Put tensors in place of the placeholders: dict writes only, no tensor is touched.

        What `torch.func.functional_call` does, without its search for names and ties in each call.
        """
        for part, module, clean in zip(parts, *self, strict=True):
            weights = {key: params[path] for key, path in part.parameters.items()}
            values = {key: buffers[path] for key, path in part.buffers.items() if path in buffers}
            vars(module)["_parameters"] = clean["_parameters"] | weights
            vars(module)["_buffers"] = clean["_buffers"] | values

    def wipe(self) -> None:
        """Forget all that a call bound or its forward stored.

        It would outlive the call: gathered parameters (an RNN keeps a list of its weights),
        activations, tensors of a `torch.func` level that has ended.
        """
        for module, clean in zip(*self, strict=True):
            vars(module).clear()
            vars(module).update(clean)


@final
class Pool:
    """Lends skeletons, so that `apply` may be entered while another call of it still runs.

    A cache only: all skeletons behave alike, so which of them serves a call cannot be seen.

    Args:
        module: the user's module.
        stateful: each call brings the buffers; otherwise they are constants, cloned here.
    """

    def __init__(self, module: nn.Module, *, stateful: bool) -> None:
        self._parts = _parts_of(module)
        self._modes = [part.training for part in module.modules()]
        self._stateful = stateful
        self._refuse_tracking(self._modes)
        self._template = _copy_of(module, stateful=stateful)
        self._kept: set[tuple[bool, ...]] = set()  # modes whose first call kept the constants
        self._lock = threading.Lock()
        self._free = [self._make()]

    def call(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Run a skeleton; its output, and the buffers that its forward replaced or changed."""
        modes = self._follow()
        self._refuse_tracking(modes)
        with self._lock:
            skeleton = self._free.pop() if self._free else None
        skeleton = skeleton or self._make()
        skeleton.bind(self._parts, params, buffers)
        for module, mode in zip(skeleton.modules, modes, strict=True):
            vars(module)["training"] = mode
        before = [_stamps(module) for module in skeleton.modules]
        # A skeleton whose forward raises is dropped, whatever it was in the middle of.
        out = skeleton.modules[0](*args, **kwargs)
        changed: dict[str, Any] = {}
        for part, module, stamps in zip(self._parts, skeleton.modules, before, strict=True):
            changed.update(_changes(part, module, stamps))
        skeleton.wipe()
        if not self._stateful and tuple(modes) not in self._kept:
            changed.update(_in_new_thread(_rewritten, self._parts, skeleton, self._template))
        # One with a changed constant too: the next has it from the template, which never runs.
        if self._stateful or not changed:
            with self._lock:
                self._kept.add(tuple(modes))
                self._free.append(skeleton)
        return out, changed

    def _make(self) -> _Skeleton:
        root = _copy_of(self._template, stateful=self._stateful)
        for module in root.modules():
            if isinstance(module, nn.RNNBase):
                # On CUDA it moves the weights it is given, the caller's, into one block in place.
                vars(module)["flatten_parameters"] = _leave_as_they_are
        return _Skeleton(tuple(root.modules()), tuple(dict(vars(m)) for m in root.modules()))

    def _follow(self) -> list[bool]:
        """Read `.training` of the user's submodules; as last seen once the module is gone."""
        if self._parts[0].source() is not None:
            self._modes = [_mode_of(part) for part in self._parts]
        return self._modes

    def _refuse_tracking(self, modes: list[bool]) -> None:
        pairs = zip(self._parts, modes, strict=True)
        tracking = [part.path for part, mode in pairs if part.tracks and mode]
        if tracking and not self._stateful:
            raise update_error("running statistics, being in train mode", tracking)


def update_error(what: str, names: list[str]) -> LayoutError:
    """Say that buffers held as constants would be, or were, updated."""
    listed = ", ".join(name or "the module" for name in names[:8]) + ", ..." * (len(names) > 8)
    return LayoutError(
        explain(
            f"the forward updates {what}: {listed}; here they are constants, and keep their value.",
            cause="BatchNorm, spectral_norm, a counter, or a cache made on first use.",
            fix="`apply, params, buffers = functionalize(module, buffers=True)`, then "
            "`out, buffers = apply(params, *args, buffers=buffers)`; or module.eval() before.",
        )
    )


def _parts_of(module: nn.Module) -> list[Part]:
    first: dict[int, str] = {}

    def named(path: str, table: Mapping[str, Tensor | None]) -> dict[str, str]:
        kept = [(key, value) for key, value in table.items() if value is not None]
        return {key: first.setdefault(id(value), _join(path, key)) for key, value in kept}

    return [
        Part(
            path=path,
            source=weakref.ref(part),
            children=[*map(id, part._modules.values())],
            parameters=named(path, part._parameters),
            buffers=named(path, part._buffers),
            tracks=isinstance(part, _NormBase)
            and part.track_running_stats
            and part.running_mean is not None,
        )
        for path, part in module.named_modules()
    ]


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _mode_of(part: Part) -> bool:
    """Read `.training` from the user's submodule, if it still holds what it held."""
    source = part.source()
    if source is not None and part.children == [*map(id, source._modules.values())]:
        kept = [key for key, value in source._parameters.items() if value is not None]
        if kept == [*part.parameters]:
            return source.training
    raise LayoutError(
        explain(
            f"{part.path or 'the module'} gained, lost or replaced submodules or parameters.",
            cause="the module was edited after `functionalize`.",
            fix="call `functionalize(module)` again, and use the new `apply` and `params`.",
        )
    )


def _copy_of(module: nn.Module, *, stateful: bool) -> nn.Module:
    """Copy a module; its parameters (if `stateful`, its buffers too) become placeholders."""
    try:
        twin = _in_new_thread(_deepcopy, module, stateful)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise _copy_error(module, str(error)) from error
    pairs = [*zip(twin.modules(), module.modules(), strict=False)]
    if any(ours is theirs or type(ours) is not type(theirs) for ours, theirs in pairs):
        raise _copy_error(module, "its `__deepcopy__` returns, or shares, the original")
    return twin


def _deepcopy(module: nn.Module, stateful: bool) -> nn.Module:
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()  # deepcopy refuses results of autograd
    for value in module.parameters():
        memo[id(value)] = nn.Parameter(_placeholder(value), requires_grad=value.requires_grad)
    for value in module.buffers():
        memo[id(value)] = _placeholder(value) if stateful else value.detach().clone()
    twin = copy.deepcopy(module, memo)
    _settle(module)
    return twin


def _rewritten(
    parts: list[Part], skeleton: _Skeleton, template: nn.Module
) -> dict[str, Tensor | None]:
    """Give the constants whose bits are not those of the template.

    `F.batch_norm` writes running statistics without counting the write, and torch.func.grad lets
    it: no version tells. Hence this comparison after the first call in each mode.
    """
    _settle(template)
    found: dict[str, Tensor | None] = {}
    for part, clean, original in zip(parts, skeleton.clean, template.modules(), strict=True):
        for key, path in part.buffers.items():
            value = clean["_buffers"][key]
            # Fake, meta, sparse and quantized tensors have no bits to look at here.
            plain = type(value) is Tensor and value.layout is torch.strided
            if plain and not value.is_meta and not value.is_quantized:
                was = original.get_buffer(key)
                if not torch.equal(_bits(value), _bits(was)):
                    found[path] = value
    return found


def _bits(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def _settle(module: nn.Module) -> None:
    """Wait for the GPU: another thread works on another stream, and this one reads or writes."""
    for device in {value.device for value in module.buffers() if value.is_cuda}:
        torch.cuda.synchronize(device)


def _in_new_thread(function: Callable[..., _T], *args: Any) -> _T:
    """Run `function` outside of every torch.func level, tracer and inference mode of this thread.

    Constants that were made inside of one could not be used after it ends.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function, *args).result()


def _placeholder(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _copy_error(module: nn.Module, why: str) -> LayoutError:
    return LayoutError(
        explain(
            f"{type(module).__name__} cannot be copied: {why}.",
            cause="an attribute that holds a lock, an open file, a process group or a graph.",
            fix="keep it outside of the module, or define `__deepcopy__` on the class that has it.",
        )
    )


def _leave_as_they_are() -> None:
    """Stand in for `RNNBase.flatten_parameters`."""


def _version(value: Tensor | None) -> int:
    """Count the writes to a tensor; inference tensors keep no count."""
    return 0 if value is None or value.is_inference() else value._version


def _stamps(module: nn.Module) -> dict[str, tuple[Tensor | None, int]]:
    """Say which tensor each buffer is, and how often it was written to."""
    return {key: (value, _version(value)) for key, value in module._buffers.items()}


def _changes(
    part: Part, module: nn.Module, stamps: dict[str, tuple[Tensor | None, int]]
) -> dict[str, Tensor | None]:
    """Give the buffers that are no longer as stamped, by first name; None for one dropped."""
    now = module._buffers
    found: dict[str, Tensor | None] = {}
    for key in stamps | now:
        value, version = stamps.get(key, (None, 0))
        new = now.get(key)
        if new is not value or _version(new) != version:
            found[part.buffers.get(key, _join(part.path, key))] = new
    return found
