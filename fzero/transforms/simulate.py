"""`simulate`: W virtual ranks in this process, the same numbers as W real ones."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.collectives import end_of_run, mismatch
from fzero.context.current_rank import current_ranks
from fzero.context.modes import in_transform, is_recorded
from fzero.errors import LayoutError, PhaseError
from fzero.errors.check import called_as, is_count, require
from fzero.machine.offload import wait_for_copies
from fzero.ranks.virtual import run_ranks
from fzero.state import NAMESPACE
from fzero.state.train_state import stack_ranks
from fzero.transforms.donation import empty, require_unwritten, returned
from fzero.transforms.models import is_state
from fzero.transforms.pipeline import Step, Transform, init_of_object, transform, transform_function


@transform_function
@called_as("simulate(step, world_size=2)")
def simulate(
    fn: Callable[..., Any] | None = None, /, *, world_size: int
) -> Step[..., Any] | Transform:
    """Run `fn` on `world_size` virtual ranks: y[r] = fn(x[r]) with collectives between the r.

    Every tensor leaf of each argument and of the result has a leading dim of length W, the rank,
    as with jax.pmap; Python numbers in the result become such tensors (int64, float64), though a
    type checker sees the types of `fn`; in a state they stay numbers. Other leaves go to every
    rank, and must come back the same from all.
    `simulate(step, world_size=W).init(params, optimizer)` takes plain, full parameters and gives
    the stacked state, where every rank's shard is visible.

    The ranks are threads that take turns (see `fzero.ranks.virtual`): exact, deterministic, any
    Python. Each starts from the caller's random state, as processes with one seed do. Without
    collectives and with W = 1 it is the identity up to the leading dim.

    The work of a rank does not grow with W: what a collective gives is made once, and copied for
    each rank, and Python's garbage collector runs as often for a rank as in a process of its own.
    Its memory is a thread, and the tensors that a process of it would hold. For init, a step and
    full parameters of a small MLP at stage 3 that is 5 to 8 ms and 0.4 MiB a rank
    (benchmarks/virtual_ranks.py).

    Differentiate inside `fn`.

    Args:
        fn: any function, a sharded step among them. x [W, *t] in the call is x[r] [*t] in `fn`.
        world_size: W, the number of ranks, at least 1.

    Returns:
        A step that is called as `fn` is, with stacked tensors. Without `fn`, a decorator.

    Raises:
        LayoutError: for a `world_size` that is no count; in a call, for a tensor argument without
            the leading dim, and for results that differ by rank in more than their tensors.
        PhaseError: in a call, inside another simulate, a torch.func transform or a trace.
        AxisError: in a call, when the ranks call other collectives.

    Source: Bradbury et al., JAX, `jax.pmap`: the stacked arguments and results are its.

    Example:
        >>> import torch, fzero
        >>> centered = fzero.simulate(lambda x: x - fzero.pmean(x), world_size=3)
        >>> centered(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-2., -1.,  3.])
    """
    require("simulate: world_size", world_size, is_count, "at least 1")

    def around(inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        arguments: Any = (args, kwargs)
        leaves, treespec = optree.tree_flatten(arguments, namespace=NAMESPACE)
        _check(leaves, arguments, world_size)
        per_rank = [
            [_of_rank(leaf, rank) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for rank in range(world_size)
        ]

        def body(rank: int) -> Any:
            mine: Any = optree.tree_unflatten(treespec, per_rank[rank])
            here, keywords = mine
            returned([*filter(is_state, _parts(mine))])  # so that a write of this rank is noticed
            made, virtual = inner(*here, **keywords), current_ranks()
            assert virtual is not None
            return made, end_of_run(virtual)

        try:
            results, ends = zip(*run_ranks(body, world_size), strict=True)
            if len({*ends}) > 1:
                raise mismatch(ends)
            return _stack(results)
        finally:  # a rank has written into what it has donated, also one that raised after that
            for i, leaf in enumerate(leaves):
                here = isinstance(leaf, Tensor) and leaf.numel()
                if here and any(not views[i].numel() for views in per_rank):
                    empty(leaf, leaf.new_empty(len(leaf), 0))

    return transform(
        "simulate",
        fn,
        _one_at_a_time()(around),
        never_around=("simulate",),
        right="one fzero.simulate, outermost",
        options={"world_size": world_size},
        init_of=lambda inner: _init_of(inner, world_size),
    )


def _init_of(inner: Any, world_size: int) -> Callable[..., Any]:
    """Return the init of a simulated step: that of the step inside, on each rank."""

    def init(params: Any, optimizer: Any, **options: Any) -> Any:
        init_inside = init_of_object(inner)
        if init_inside is None:
            raise LayoutError(
                "simulate(...).init: the function inside has no init.",
                cause="`fzero.shard` is missing.",
                fix="fzero.simulate(fzero.shard(step, stage=...), world_size=...); or give the "
                "object a method init(params, optimizer).",
            )
        with _one_at_a_time():
            _check([], (), world_size)
            made = run_ranks(lambda _: init_inside(params, optimizer, **options), world_size)
            return _stack(made)

    return init


_RUNS = threading.Lock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait while another thread simulates: its ranks take turns with torch's state of the process.

    A rank itself goes on, and is told that it is one.
    """
    if current_ranks() is not None:
        yield
        return
    with _RUNS:
        yield


def _of_rank(leaf: Tensor, rank: int) -> Tensor:
    """Give the rank its own tensor, with a count of writes that other ranks do not raise."""
    return leaf[rank] if leaf.requires_grad else leaf[rank].data


def _check(leaves: list[Any], arguments: Any, world_size: int) -> None:
    if current_ranks() is not None or in_transform() or is_recorded(leaves):
        raise PhaseError(
            "simulate: called inside another simulate, a torch.func transform or a trace.",
            cause="the transform was put around simulate; virtual ranks are threads, which "
            "no transform reaches.",
            fix="put it inside: fzero.simulate(torch.func.grad(fn), world_size=...); trace on "
            "one rank, or in processes.",
        )
    require_stacked("simulate", arguments, world_size)
    for one in filter(is_state, _parts(arguments)):
        require_unwritten(one, optree.tree_leaves(one, namespace=NAMESPACE))


def require_stacked(name: str, arguments: Any, world_size: int) -> None:
    """Raise `LayoutError` for a tensor without a first dim of the ranks. name: of the call."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(arguments, namespace=NAMESPACE)
    for accessor, leaf in zip(accessors, leaves, strict=True):
        if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != world_size):
            raise LayoutError(
                f"{name}: {accessor.codify('arguments')} has shape {tuple(leaf.shape)}; "
                f"dim 0 must be the {world_size} ranks.",
                cause="one batch was passed in place of one for each rank.",
                fix=f"stack one for each rank, or tensor.expand({world_size}, ...) to give "
                "all the same; make states with simulate(...).init.",
            )


def _stack(results: Sequence[Any]) -> Any:
    flat = [optree.tree_flatten(result, namespace=NAMESPACE) for result in results]
    treespec = flat[0][1]
    for rank, (_, other) in enumerate(flat):
        if other != treespec:
            raise _unlike(rank, results[rank], results[0])
    wait_for_copies(leaf for leaves, _ in flat for leaf in leaves)
    columns = [list(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    of_states = [
        is_state(part)
        for part in _parts(results[0])
        for _ in optree.tree_leaves(part, namespace=NAMESPACE)
    ]
    stacked = [
        _stack_of_states(column) if of_state else _stack_leaf(column)
        for column, of_state in zip(columns, of_states, strict=True)
    ]
    made: Any = optree.tree_unflatten(treespec, stacked)
    returned([*filter(is_state, _parts(made))])
    return made


def _parts(tree: Any) -> list[Any]:
    """The leaves of a tree, of which a state is one."""
    return optree.tree_leaves(tree, is_leaf=is_state, namespace=NAMESPACE)


def _stack_of_states(column: list[Any]) -> Any:
    if all(isinstance(x, int | float) and x == column[0] for x in column):
        return column[0]  # a foreign optimizer counts on with a Python number
    tensors = all(isinstance(x, Tensor) for x in column)
    if tensors and len({x.shape for x in column if x.numel()}) == 1:
        return stack_ranks(column)  # those that own a parameter keep it, and the others nothing
    return _stack_leaf(column)


def _stack_leaf(column: list[Any]) -> Any:
    head, size = column[0], len(column)
    if any(isinstance(x, Tensor) for x in column):
        column = [torch.as_tensor(x) for x in column if isinstance(x, Tensor | int | float)]
        shapes = {tuple(x.shape) for x in column}
        if len(shapes) > 1 or len(column) < size:
            raise LayoutError(
                f"simulate: the ranks returned tensors {sorted(shapes)}, or no tensor.",
                cause="a result whose size depends on the rank.",
                fix="pad it to one shape, or reduce it first.",
            )
        return torch.stack(column)
    if isinstance(head, int | float):
        is_float = any(isinstance(x, float) for x in column)
        return torch.tensor(column, dtype=torch.float64 if is_float else None)
    if all(x is head or x == head for x in column):
        return head
    raise LayoutError(
        f"simulate: the ranks returned different values: {column!r}.",
        cause="a result that is no tensor and no number, and differs by rank.",
        fix="return tensors or numbers.",
    )


def _unlike(rank: int, theirs: Any, first: Any) -> LayoutError:
    """Name the first place where two results differ, whatever their tensors are."""
    theirs, first = (optree.tree_map(lambda _: 0, x, namespace=NAMESPACE) for x in (theirs, first))
    here = optree.tree_structure(theirs, is_leaf=is_state, namespace=NAMESPACE)
    there = optree.tree_structure(first, is_leaf=is_state, namespace=NAMESPACE)
    if here != there:
        return LayoutError(
            f"simulate: rank {rank} returned {here}, rank 0 {there}.",
            cause="a branch that depends on the rank.",
            fix="return the same structure on every rank.",
        )
    pairs = zip(here.flatten_up_to(theirs), there.flatten_up_to(first), strict=True)
    found = (_differing_fact(mine, other) for mine, other in pairs if is_state(mine))
    name, mine, other = next(filter(None, found), ("structure", here, there))
    return LayoutError(
        f"simulate: rank {rank} returned a state with {name} = {mine!r:.200}, "
        f"rank 0 one with {other!r:.200}.",
        cause="a state, its optimizer or the schedule of its lr was made inside the simulated "
        "function, anew on each rank; or the ranks took other ways between two updates.",
        fix="make schedules and optimizers once, outside; make states with simulate(...).init.",
    )


def _differing_fact(a: Any, b: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first static fact in which two records differ: (its name, a's, b's)."""
    if type(a) is type(b) and dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a)]
        pairs = [(f"{name}.{key}".strip("."), getattr(a, key), getattr(b, key)) for key in names]
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        pairs = [(f"{name}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return None if a == b else (name, a, b)
    found = (_differing_fact(x, y, key) for key, x, y in pairs)
    return next(filter(None, found), None)
