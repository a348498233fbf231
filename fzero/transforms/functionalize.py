"""From an `nn.Module` to a pure function of its parameters: `functionalize`, and the unit rule."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fzero.errors import LayoutError
from fzero.machine.beside import TensorsBeside, held_beside, note, require_paths
from fzero.machine.memory import HeldTensor, Holder, require_own_memory
from fzero.machine.partition import is_dtensor, unit_of
from fzero.machine.subclasses import require_classes
from fzero.state.buffers import Buffers
from fzero.state.precision import remember_owners
from fzero.transforms._closed_over import watch
from fzero.transforms.module_copy import Template, call_copy, update_error

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
    _remember_beside(options["template"].module, params, clones, own)
    if clones is not None:
        return StatefulApply(**options), params, clones
    return Apply(**options), params


def _remember_beside(
    twin: nn.Module, params: Tensors, buffers: Tensors | None, own: Collection[str]
) -> None:
    """Note on the parameters which other tensors are to be alike on all ranks."""
    held = held_beside(twin)
    if buffers is not None:
        rest = [one for one in held if one.kind is not Holder.BUFFER]
        held = [*rest, *(HeldTensor(path, x, Holder.BUFFER) for path, x in buffers.items())]
    note(params.values(), TensorsBeside(held, require_paths(own, held)))


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
