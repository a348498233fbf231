"""`remat`: keep only the inputs of a function, and compute it again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import optree
import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.func import functional_call

from fzero.collectives import Block, anchors, connected, run_of, tied_to, without_hooks
from fzero.context.modes import AutocastModes, in_transform
from fzero.context.rng import at_states, of_devices
from fzero.errors import LayoutError
from fzero.state import NAMESPACE
from fzero.state.layout import as_real
from fzero.transforms.closure import ClosureWatch
from fzero.transforms.functionalize import tracks
from fzero.transforms.pipeline import P, R, describe_function, require_function, require_order

# The forward and the backward of `remat` by ordinary autograd, which the function may use itself.
#
# A function that calls torch.autograd.grad(..., create_graph=True) needs a graph of its own: in the
# forward one that goes when the call is over, in the backward the one of the recomputation.


class _Same(torch.autograd.Function):
    """y = x, on the same memory, and no view of x for autograd: a function may write to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        return dys[0]


def own(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Detach values, and make those that required grad leaves of a new graph."""
    return [_Same.apply(_leaf(x)) if x.requires_grad else x for x in tensors]


@contextmanager
def recording() -> Iterator[None]:
    """Record a graph that goes with the call: no larger than the one that backward makes.

    Hooks that move what is kept for backward, to host memory for one, are not to see it.
    """
    with without_hooks(), torch.enable_grad():
        yield


def recomputed_gradients(ctx: Any, dys: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients by the saved tensors of a call that is run again.

    They can be differentiated again where the backward itself is recorded (create_graph).
    """
    tensors, graph = ctx.saved_tensors, torch.is_grad_enabled()
    given = list(tensors)
    sources: dict[int, Any] = {}
    with torch.enable_grad():
        for i, x in enumerate(tensors):
            if x.requires_grad:
                sources[i] = _Same.apply(x) if graph else _leaf(x)
                given[i] = _Same.apply(sources[i])
        anchor = torch.zeros(0, requires_grad=True)
        with run_of(ctx.call.block, anchor) as run:
            ys = ctx.call.again(*given)
    roots = [(y, dy) for y, dy in zip(ys, dys, strict=False) if y.requires_grad and dy is not None]
    tokens = (run.tokens or {}).values()
    roots += [(token, torch.zeros(0)) for token in tokens if token.requires_grad]
    asked = {i: x for i, x in sources.items() if ctx.needs_input_grad[i + 1]}
    if not (roots and asked):
        return [None] * len(tensors)
    outputs, by = [list(one) for one in zip(*roots, strict=True)]
    keep = graph or _autograd._get_current_graph_task_keep_graph()
    options: Any = {"create_graph": graph, "retain_graph": keep, "allow_unused": True}
    found = torch.autograd.grad(outputs, [*asked.values(), anchor], by, **options)
    of = dict(zip(asked, found, strict=False))
    return [of.get(i) for i in range(len(tensors))]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


_STEPS = ("shard", "coalesce", "accumulate", "clip", "simulate")


@overload
def remat(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def remat() -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def remat(fn: Callable[..., Any] | None = None, /) -> Any:
    """Return `fn` with its activations recomputed in backward: y = fn(x), saving x only.

    For a part of a loss (a layer, a block), not for a step. First and higher order, reverse and
    forward mode, under every torch.func transform, where torch.utils.checkpoint fails. `fn` may
    itself take a derivative: torch.func.grad anywhere, torch.autograd.grad(..., create_graph=True)
    where the call is not under a torch.func transform. Random numbers are drawn again as they were,
    also those of a torch.Generator of yours, under the autocast of the call.

    What is differentiated by must be an argument: any pytree of tensors. Of an `nn.Module`, or of a
    bound method of one, the parameters are arguments too: `fzero.remat(block)(x)`. A tensor that
    `fn` reaches in another way (a closure, a global, an attribute) is a constant if it has no
    gradient, and refused if it has one, for that gradient would be missing.

    At stage 3 the parameters that `fn` uses are gathered in forward, let go, and gathered again
    in backward with or without `remat`; with it the activations are not kept either.

    Args:
        fn: a function, an `nn.Module` or a bound method of one.

    Returns:
        A function that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: `fn` is a train step, or no function. In a call: it reads a tensor that
            requires grad and is no argument; it calls torch.autograd.grad under a torch.func
            transform; a norm of the module updates running statistics.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

    Example:
        >>> import torch, fzero
        >>> layer = fzero.remat(lambda p, x: torch.tanh(x @ p["w"]))
        >>> w = {"w": torch.eye(2)}
        >>> torch.func.grad(lambda p: layer(p, torch.zeros(1, 2)).sum())(w)["w"].shape
        torch.Size([2, 2])
        >>> block = torch.nn.Linear(2, 1)
        >>> fzero.remat(block)(torch.ones(3, 2)).sum().backward()
        >>> block.bias.grad
        tensor([3.])
    """

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        require_function("remat", inner)
        require_order(
            "remat", inner, never_around=_STEPS, right="remat around a layer inside the loss"
        )
        # A partial is copied along with the module that holds it, and then runs the copy's layer;
        # a function may be a method of a class.
        bound: Any = functools.partial(_recomputed, inner)
        plain: Any = lambda *args, **kwargs: _recomputed(inner, *args, **kwargs)  # noqa: E731
        made = plain if _owner(inner) is None else bound
        functools.update_wrapper(made, inner, updated=())
        made.__name__ = made.__qualname__ = f"remat . {describe_function(inner)}"
        return made

    return wrap if fn is None else wrap(fn)


def _recomputed(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # Where a jvp is inside another, what `_Remat` saved has lost the outer tangent. Forward mode
    # keeps no activations, so that there is nothing to compute again for it.
    levels = get_interpreter_stack() or []
    if sum(level.key() == TransformType.Jvp for level in levels) > 1:
        return fn(*args, **kwargs)
    call = _Call(fn, (args, kwargs))
    tensors = call.tensors
    if not call.plain:  # with a graph, too, where what it is given has none, as on other ranks
        tensors = [*tensors, *anchors().values()]
    elif not (call.records and any(x.requires_grad for x in tensors)):
        with ClosureWatch(tensors, records=call.records, plain=True) as watch:
            outputs = call(*tensors)
        for y in outputs:
            watch.refuse(y)
        return call.unflatten(outputs)
    outputs = _Remat.apply(call, *tensors)
    for number, token in zip(call.block.calls, outputs[call.count :], strict=True):
        connected(number, token, backward=False)
    return call.unflatten(outputs)


def _owner(fn: Callable[..., Any]) -> nn.Module | None:
    """The module whose parameters are arguments of `fn`."""
    owner = getattr(fn, "__self__", fn)
    return owner if isinstance(owner, nn.Module) else None


class _Held(nn.Module):
    """A module that is run by one of its methods."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        vars(self)["method"] = method

    def call_with(self, params: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        """Run it on other parameters, given by the names that `named_parameters` gives.

        Each place of a tied parameter is named once, and a module that occurs twice is one place:
        with `tie_weights=True`, torch puts the wrong tensors back into such a module.
        """
        first = {id(value): name for name, value in self.named_parameters()}
        places = {
            f"{path}.{name}": params[first[id(value)]]
            for path, part in self.named_modules()
            for name, value in part.named_parameters(recurse=False, remove_duplicate=False)
        }
        return functional_call(self, places, args, kwargs, tie_weights=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["method"](*args, **kwargs)


class _Call:
    """One call of a function as a map from tensors to tensors, with its random state."""

    def __init__(self, fn: Callable[..., Any], args: Any) -> None:
        owner = _owner(fn)
        if owner is None:
            self._run: Callable[..., Any] = lambda args, kwargs: fn(*args, **kwargs)
        else:
            for name, part in owner.named_modules():
                if tracks(part) and part.training:
                    raise LayoutError(
                        f"remat: {name or 'the module'} ({type(part).__name__}) updates its "
                        "running statistics, and would do so again when it is recomputed.",
                        cause="a batch norm in train mode inside remat.",
                        fix="leave it out of remat, or put it in eval mode.",
                    )
            held = _Held(owner, fn)
            self._run = held.call_with
            args = dict(held.named_parameters()), *args
        leaves, self._treespec = optree.tree_flatten(args, namespace=NAMESPACE)
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._others = [
            None if is_t else x for x, is_t in zip(leaves, self._is_tensor, strict=True)
        ]
        self.tensors = [x for x in leaves if isinstance(x, Tensor)]
        self.records = torch.is_grad_enabled()
        self.plain = not in_transform()
        self._random = {id(one): (one, one.get_state()) for one in of_devices()}
        self._autocast = AutocastModes.take()
        self._out: tuple[Any, list[Any]] | None = None
        self.block = Block()

    @property
    def count(self) -> int:
        """How many tensors the function has returned."""
        assert self._out is not None
        return sum(other is None for other in self._out[1])

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the function on other tensors in the same places."""
        rest = iter(tensors)
        pairs = zip(self._is_tensor, self._others, strict=True)
        leaves = [next(rest) if is_tensor else other for is_tensor, other in pairs]
        arguments: Any = optree.tree_unflatten(self._treespec, leaves)
        out, treespec = optree.tree_flatten(self._run(*arguments), namespace=NAMESPACE)
        self._out = treespec, [None if isinstance(x, Tensor) else x for x in out]
        # An output that is an input must be a tensor of its own for autograd.
        own = [
            x.view_as(x) if any(x is t for t in tensors) else x
            for x in out
            if isinstance(x, Tensor)
        ]
        return tuple(own)

    def again(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run it once more with the random numbers, and the autocast, of the first time."""
        with at_states([*self._random.values()]), self._autocast.entered():
            return self(*tensors)

    def drew(self, own: Mapping[int, tuple[torch.Generator, Tensor]]) -> None:
        """Learn of the user's generators, with the state that each had when it was first used."""
        self._random = {**own, **self._random}

    def unflatten(self, outputs: Sequence[Tensor]) -> Any:
        """Put the output tensors back into the structure that the function returned."""
        assert self._out is not None
        treespec, others = self._out
        rest = iter(outputs)
        leaves = [next(rest) if other is None else other for other in others]
        return optree.tree_unflatten(treespec, leaves)


class _Mapped:
    """A call under vmap: the same tensors in and out, with a batch dim in front."""

    def __init__(self, call: Any, in_dims: tuple[Any, ...], randomness: str) -> None:
        self.call, self.in_dims, self.randomness = call, in_dims, randomness
        self.records, self.plain, self.block = call.records, False, call.block

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vmap(self.call, self.in_dims, randomness=self.randomness)(*tensors)

    def drew(self, own: Mapping[int, tuple[torch.Generator, Tensor]]) -> None:
        self.call.drew(own)

    def again(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vmap(self.call.again, self.in_dims, randomness=self.randomness)(*tensors)


class _Remat(torch.autograd.Function):
    """outputs = call(*tensors), recomputed by each rule from the saved inputs."""

    @staticmethod
    def forward(call: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        recorded = call.records and call.plain
        with recording() if recorded else torch.no_grad():
            given = own(tensors) if recorded else tensors
            watching = ClosureWatch(given, records=call.records, plain=call.plain)
            with watching as watch, run_of(call.block):
                outputs = call(*given)
        call.drew(watch.drawn)
        for y in outputs:
            watch.refuse(y)
        tokens = [torch.zeros(0) for _ in call.block.calls]
        return *(y.detach() if recorded else y for y in outputs), *tokens

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.mark_non_differentiable(*[y for y in output if not _smooth(y)])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        if ctx.call.plain and not in_transform():
            return None, *recomputed_gradients(ctx, dys)
        tensors = ctx.saved_tensors
        smooth = [i for i, x in enumerate(tensors) if _smooth(x)]

        # <y, dy> of real views, and not torch.func.vjp: that runs backward after its level is gone,
        # where the tensors that a remat inside has saved can no longer be used.
        def product(anchor: Tensor, *xs: Tensor) -> Any:
            with run_of(ctx.call.block, anchor) as run:
                ys = ctx.call.again(*_replaced(tensors, smooth, xs))
            pairs = [(y, dy) for y, dy in zip(ys, dys, strict=False) if _smooth(y)]
            parts = [(as_real(y) * as_real(dy)).sum() for y, dy in pairs if dy is not None]
            total: Any = sum(parts, start=torch.zeros(()))
            return tied_to(total, [*run.tokens.values()]) if run.tokens else total

        by = tuple(range(len(smooth) + 1))
        found: Any = torch.func.grad(product, by)(torch.zeros(0), *(tensors[i] for i in smooth))
        grads = dict(zip(smooth, found[1:], strict=True))
        return None, *(grads.get(i) for i in range(len(tensors)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        moved = [i for i, t in enumerate(tangents) if t is not None]
        anchor, primals = torch.zeros(0), [tensors[i] for i in moved]

        def outputs(anchor: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
            with run_of(ctx.call.block, anchor):
                return ctx.call.again(*_replaced(tensors, moved, xs))

        given = anchor, *(tangents[i] for i in moved)
        pushed: Any = torch.func.jvp(outputs, (anchor, *primals), given)
        pairs = zip(*pushed, strict=True)
        moved_tokens = [torch.zeros(0) for _ in ctx.call.block.calls]
        return *(dy if _smooth(y) else None for y, dy in pairs), *moved_tokens

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Any, *tensors: Tensor) -> tuple[Any, Any]:
        mapped = _Mapped(call, tuple(in_dims[1:]), info.randomness)
        outputs = _Remat.apply(mapped, *tensors)
        tokens = len(call.block.calls)
        return outputs, (*[0] * (len(outputs) - tokens), *[None] * tokens)


def _smooth(y: Tensor) -> bool:
    return y.is_floating_point() or y.is_complex()


def _replaced(
    tensors: Sequence[Tensor], where: Sequence[int], by: Sequence[Tensor]
) -> list[Tensor]:
    new = list(tensors)
    for i, x in zip(where, by, strict=True):
        new[i] = x
    return new
