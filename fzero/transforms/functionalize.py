"""From an `nn.Module` to a pure function of its parameters: `functionalize`, and the unit rule."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from fzero.errors import LayoutError
from fzero.machine.module_buffers import TensorsBeside, held_beside, note, require_paths
from fzero.machine.partition import (
    HeldTensor,
    Holder,
    is_dtensor,
    require_classes,
    require_own_memory,
    unit_of,
)
from fzero.state.buffers import Buffers
from fzero.state.setup import remember_owners
from fzero.transforms.closure import watch

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
        memo: dict[int, Any] = {}  # of deep copies: this call's tensors and modules
        if self._deep:
            given = {**params, **buffers}
            memo = {id(tensor): tensor for tensor in self._tensors}
            memo |= {number: given[name] for number, name in self._names.items()}
            memo |= {id(a): b for a, b in zip(self._modules, copies, strict=True)}
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


Tensors = dict[str, Tensor]
Predicate = Callable[[str, nn.Module], bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _Apply(ABC):
    name: str
    parameters: dict[str, torch.Size]
    buffers: dict[str, torch.Size]
    chosen: frozenset[str]  # submodules that the `units` predicate picked
    template: Template

    @property
    def __name__(self) -> str:
        return "apply"

    def __repr__(self) -> str:
        units = {self.units(path) for path in self.parameters}
        return f"apply({self.name}, {len(self.parameters)} params, {len(units)} units)"

    def units(self, path: str) -> str:
        """Name the stage-3 gather unit of the parameter called `path`.

        The outermost submodule around it that the `units` predicate of `functionalize` picked;
        where there is none, what `unit_of` says.
        """
        parts = path.split(".")
        prefixes = (".".join(parts[:depth]) for depth in range(len(parts)))
        return next((prefix for prefix in prefixes if prefix in self.chosen), unit_of(path))

    @abstractmethod
    def __call__(self, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Run the module with `params` in place of its parameters."""


@final
class Apply(_Apply):
    """`apply(params, *args, **kwargs) -> out`, with the module's buffers as constants."""

    __slots__ = ()

    def __call__(self, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Run a copy of the module with `params` in place of its parameters.

        Raises:
            LayoutError: `params` has other names or shapes than the module; the module gained or
                lost submodules; a forward has updated a buffer. The constants are then no longer
                what they were, and each later call raises too. (Inside a torch.func transform
                torch itself refuses the write, with a RuntimeError, before it is made.)
        """
        if "buffers" in kwargs:
            raise LayoutError(
                f"{self!r} was given `buffers`, but holds its buffers as constants.",
                cause="it was made by `functionalize(module)`.",
                fix="make it by `functionalize(module, buffers=True)`, or pass no `buffers`.",
            )
        _check("params", self.parameters, params)
        copies = self.template.bind(params, {})
        out = call_copy(copies, args, kwargs)
        if changed := self.template.changed(copies):
            raise update_error("buffers", changed)
        return out


@final
class StatefulApply(_Apply):
    """`apply(params, *args, buffers=buffers, **kwargs) -> (out, new_buffers)`."""

    __slots__ = ()

    def __call__(
        self, params: Mapping[str, Tensor], /, *args: Any, buffers: Tensors, **kwargs: Any
    ) -> tuple[Any, Tensors]:
        """Run a copy of the module with `params` and `buffers` in place of its own.

        `new_buffers` are new tensors of the same names, detached: no gradient flows through them.

        Raises:
            LayoutError: `params` or `buffers` have other names or shapes than the module; the
                module gained or lost submodules; its forward adds or drops a buffer.
        """
        _check("params", self.parameters, params)
        _check("buffers", self.buffers, buffers)
        own = {path: value.detach().clone() for path, value in buffers.items()}
        copies = self.template.bind(params, own)
        out = call_copy(copies, args, kwargs)
        new: Tensors = {}
        for path, value in self.template.buffers_of(copies).items():
            if path not in own or value is None:
                raise LayoutError(
                    f"the forward of {self.name} added or dropped the buffer {path!r}.",
                    cause="a buffer that is made on first use.",
                    fix="run the module once, then functionalize it.",
                )
            new[path] = value.detach()
        return out, {path: new[path] for path in buffers}


@overload
def functionalize(
    module: nn.Module,
    *,
    buffers: Literal[False] = False,
    units: Predicate | None = None,
    own: Collection[str] = (),
) -> tuple[Apply, Tensors]: ...
@overload
def functionalize(
    module: nn.Module,
    *,
    buffers: Literal[True],
    units: Predicate | None = None,
    own: Collection[str] = (),
) -> tuple[StatefulApply, Tensors, Tensors]: ...
def functionalize(
    module: nn.Module,
    *,
    buffers: bool = False,
    units: Predicate | None = None,
    own: Collection[str] = (),
) -> tuple[Apply, Tensors] | tuple[StatefulApply, Tensors, Tensors]:
    """Split a module into a pure function and its parameters: `apply(params, x) == module(x)`.

    Each call of `apply` runs a copy of the module of its own, which holds `params` in place of the
    parameters: threads may be inside `apply` at once, and a checkpoint inside the module
    (`torch.utils.checkpoint`, both kinds) is recomputed in backward with the parameters of its own
    call, whatever was called in between. What the forward stores on its `self` stays on that copy.

    `apply` follows the train/eval mode that the module has when it is called, dropout included;
    it does not keep the module alive, and once the module is gone it goes on in the mode of the
    last call. All else is as it is now: buffers are cloned, and a later change of, say, a dropout
    rate is not seen.

    A forward that updates constant buffers is refused. Torch counts the writes to a tensor, and the
    ones that it does not count are not seen: through `.data` or NumPy, by `F.batch_norm` outside
    of torch's own norms, and in place inside a function that torch.compile has compiled.

    Args:
        module: any module, except one in which several processes or devices are already at work.
        buffers: give and take the buffers explicitly, for modules that update them (BatchNorm).
        units: `units(name, submodule)` is true for submodules whose parameters stage 3 gathers
            together, the outermost one counting; elsewhere `unit_of` decides.
        own: paths of buffers, and of tensors in attributes, that each rank may have for itself
            (the positions of its piece of a sequence). All others must be equal: the ranks compare
            them where a state is made of the returned `params`, by `fzero.init` or a step's
            `init`, and a difference raises there (`MismatchError`, which names the tensor).

    Returns:
        `(apply, params)`, or `(apply, params, buffers)`. `params` and `buffers` map qualified name
        to tensor, tied ones once, under their first name. `params` shares memory with the module
        and is detached from it; a frozen parameter (`requires_grad=False`) comes as an
        `nn.Parameter` that requires no gradient, all others as plain tensors. `buffers` are clones.
        A functional loss whose backward reaches the module's own parameters, past `params`,
        raises `PhaseError`: that part of its gradient would be lost.

    Raises:
        LayoutError: not a module, or one that is lazy, wrapped, compiled, cannot be copied, writes
            to its weights in the forward (`max_norm`), has sparse gradients, has parameters of a
            class with a rule of its own (quantized weights), or updates buffers while `buffers` is
            False; one that holds views of its parameters or buffers (`b.data = a.data.t()`, a
            buffer made by p.detach(), a slice kept as an attribute), which would no longer be
            views.

    Source: PyTorch, `torch.func.functional_call`, on a copy; Babuschkin et al., Haiku,
    `haiku.transform`: a module as a pure function and its parameters.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> apply, params = functionalize(module)
        >>> apply, [*params]
        (apply(Linear, 2 params, 2 units), ['weight', 'bias'])
        >>> x = torch.ones(3, 2)
        >>> torch.equal(apply(params, x), module(x))
        True
        >>> torch.func.grad(lambda params: apply(params, x).sum())(params)["bias"]
        tensor([3.])
    """
    if not isinstance(module, nn.Module):
        raise LayoutError(
            f"functionalize takes an nn.Module, got {type(module).__name__}.",
            cause="a function, a class without the call that makes a module, or its params.",
            fix="pass the module; a pure function of a pytree needs no functionalize.",
        )
    _refuse(module)
    require_classes(dict(module.named_parameters()), keeps=False)
    require_own_memory(module, buffers=buffers, attributes=True)
    given = dict(module.named_buffers())
    picked = (n for n, m in module.named_modules() if units is not None and units(n, m))
    options: dict[str, Any] = {
        "name": type(module).__name__,
        "parameters": {path: value.shape for path, value in module.named_parameters()},
        "buffers": {path: value.shape for path, value in given.items()},
        "chosen": frozenset(picked),
        "template": Template(module, stateful=buffers),
    }
    params = {
        path: value.detach() if value.requires_grad else nn.Parameter(value.detach(), False)
        for path, value in module.named_parameters()
    }
    remember_owners(module, params)
    for path, value in module.named_parameters():
        watch(path, value)
    clones = {path: x.detach().clone() for path, x in given.items()} if buffers else None
    # Noted on the parameters: which other tensors are to be alike on all ranks.
    held = held_beside(options["template"].module)
    if clones is not None:
        held = [one for one in held if one.kind is not Holder.BUFFER]
        held += [HeldTensor(path, x, Holder.BUFFER) for path, x in clones.items()]
    note(params.values(), TensorsBeside(held, require_paths(own, held)))
    if clones is not None:
        return StatefulApply(**options), params, clones
    return Apply(**options), params


def _check(kind: str, shapes: dict[str, torch.Size], given: Any) -> None:
    """Compare names and shapes; the values are not touched, they may be any kind of tensor."""
    if isinstance(given, Buffers):
        raise LayoutError(
            f"{kind} is the {kind} of a state: flat tensors, which may be shards.",
            cause="`apply(state.params, ...)`.",
            fix="in a loss use the params that grad_and_reduce gives it; elsewhere "
            "`apply(fzero.full_params(state), ...)`.",
        )
    if not isinstance(given, Mapping):
        raise LayoutError(
            f"apply got a {type(given).__name__} in the place of the {kind}.",
            cause="a state, the module or the batch as the first argument.",
            fix="call apply(params, x): in a loss with the params that it is given; of a state "
            "with fzero.evaluate(apply, state)(x).",
        )
    missing = [path for path in shapes if path not in given]
    extra = [path for path in given if path not in shapes]
    if missing or extra:
        first = f"no {missing[0]!r}" if missing else f"an unexpected {extra[0]!r}"
        counts = f"{len(missing)} missing, {len(extra)} unexpected of {len(shapes)}"
        raise _mismatch(f"{kind} has {first} ({counts}).")
    for path, shape in shapes.items():
        value = given[path]
        if not isinstance(value, Tensor):
            raise _mismatch(f"{kind}[{path!r}] is a {type(value).__name__}, not a tensor.")
        if value.shape != shape:
            seen, expected = tuple(value.shape), tuple(shape)
            raise _mismatch(f"{kind}[{path!r}] has shape {seen}, the module has {expected}.")


def _mismatch(seen: str) -> LayoutError:
    return LayoutError(
        seen,
        cause="the tensors of another module or an older one, or an entry added or renamed.",
        fix="pass what `functionalize` returned, or a dict of the same names and shapes.",
    )


def _refuse(module: nn.Module) -> None:
    """Refuse modules that cannot become a pure function."""
    for path, part in module.named_modules():
        where = f"{path or 'the module'} ({type(part).__name__})"
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if any(map(is_lazy, own)):
            seen, cause = "has lazy parameters or buffers", "no forward has given them a shape yet."
            fix = "run one forward first, then functionalize."
        elif isinstance(part, nn.DataParallel | DistributedDataParallel):
            seen, cause = "already spreads a module over devices", "it was wrapped before."
            fix = "pass the module inside it (`.module`)."
        elif any(map(is_dtensor, own)):
            seen = "has DTensors for parameters"
            cause = "fully_shard or parallelize_module was called on it."
            fix = "leave that call out: fzero shards whole parameters."
        elif "_orig_mod" in part._modules or part._compiled_call_impl is not None:
            seen, cause = "is compiled", "torch.compile was called on it, or its `compile()`."
            fix = (
                "functionalize the module as it was before; compile the function that uses `apply`."
            )
        elif isinstance(part, torch.jit.ScriptModule):
            seen, cause = "is a ScriptModule", "its parameters cannot be replaced from outside."
            fix = "pass the module that it was scripted from."
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            seen = f"has max_norm={part.max_norm}"
            cause = "it writes to its weight in every forward, which a pure function may not."
            fix = "leave max_norm out; normalize the rows that are used, or after each update."
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            seen, cause = "has sparse=True", "sparse gradients have no place in flat buffers."
            fix = "leave sparse out."
        else:
            continue
        raise LayoutError(f"{where} {seen}.", cause=cause, fix=fix)
