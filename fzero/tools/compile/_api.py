"""`compile`: a step that runs its compiled graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optree
from torch import Tensor

from fzero.context.current_rank import current_ranks, is_abstract
from fzero.context.modes import in_transform, is_recorded, wants_graph
from fzero.errors import LayoutError, PhaseError, explain
from fzero.errors.check import is_count
from fzero.state import NAMESPACE
from fzero.tools.compile._graph import Graph, graph_of, tensors_of
from fzero.tools.compile._key import key_of
from fzero.tools.compile._run import (
    COMPILERS,
    EARLY_BYTES,
    MERGED_BYTES,
    Backend,
    axis_of_states,
    step_donates,
)
from fzero.transforms.pipeline import P, R, Step, require_order


def compile(
    fn: Callable[P, R],
    /,
    *,
    backend: Backend = "inductor",
    max_graphs: int = 8,
    bucket_bytes: int = MERGED_BYTES,
    gather_bytes: int = EARLY_BYTES,
) -> Step[P, R]:
    """Return a step that runs the graph of `fn` (see `fzero.trace`): the same numbers, less Python.

    The first call with arguments of some shapes records the graph, applies the passes of
    `fzero.compile`, and compiles what lies between two collectives as one. A collective is started
    where the step starts it, and waited for where its result is read. Other shapes, another
    schedule of stage 3, options of the step that changed, another mode of a functionalized module
    (`module.eval()`), and another value of what functions of the step read (globals, cells,
    attributes, entries, torch's switches) are another graph; so are arguments of which others are
    one tensor, or overlap in memory.

    Random numbers are those of the step, also where it recomputes, forks or seeds generators. The
    first call of each graph also runs the step itself, from the same random state, and compares
    what both return, bit for bit, and the random state afterwards: the graph before a compiler
    rounds. Where they differ, and where a step has no graph (it reads a list of 10,000 numbers, or
    writes into a tensor that it closes over; logical ranks, local updates, encoded moments), the
    step itself runs from then on, on all ranks, with a warning that says why.

    With `shard(..., donate=True)` the new state is written into the memory of the old one, which is
    used up. The update is the kernel that the step itself runs, the learning rate of a schedule is
    asked for in each call. Kernels of a compiler may round otherwise than torch's: on exact inputs
    the bits are the same.

    Args:
        fn: (state, *args) -> (state, aux), sharded; outermost but for nothing.
        backend: "inductor" compiles; "eager" runs the ops of the graph one by one.
        max_graphs: how many graphs are kept. Arguments that would need one more run `fn` itself,
            with a warning.
        bucket_bytes: up to which size of full buffers small collectives in a row become one.
        gather_bytes: up to which size stage 3 gathers parameters before they are read.

    Returns:
        A step that is called as `fn` is, with its `init`. A collective.

    Raises:
        LayoutError: for bad options; for an optimizer whose options are read from a torch.optim
            instance, which a graph would hold fast; for a loss that writes into its arguments.
        PhaseError: in a call, on virtual ranks, and if the step reads values (`.item()`).
        MismatchError: in a call, on every rank, if the ranks run other graphs.

    Source: Reed et al., "torch.fx", arXiv 2112.08429; Ansel et al., "PyTorch 2", ASPLOS 2024.

    Example:
        >>> import torch, fzero
        >>> from fzero.compile import compile
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = compile(fzero.shard(step_fn, stage=2), backend="eager")
        >>> state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.5))
        >>> state, loss = step(state, torch.tensor([1.0, 2.0]))
        >>> loss, fzero.full_params(state)["w"]
        (tensor(3.), tensor([0.5000, 0.0000]))
    """
    sizes = {"bucket_bytes": bucket_bytes, "gather_bytes": gather_bytes}
    _check(fn, backend, max_graphs=max_graphs, **sizes)
    graphs: list[_Known] = []
    given_up: list[str] = []
    donate = step_donates(fn)

    def around(inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        arguments: Any = (*args, kwargs)
        leaves = optree.tree_leaves(arguments, namespace=NAMESPACE)
        if given_up or is_abstract() or in_transform() or is_recorded(()) or wants_graph(leaves):
            return inner(*args, **kwargs)
        _require_real_ranks()
        key, tensors = key_of(arguments), tensors_of(arguments)
        found = _known(graphs, key, tensors)
        graph = found[1] if found is not None else None
        is_new = graph is None or graph.run is None
        if graph is None and len(graphs) >= max_graphs:
            warnings.warn(_MANY.format(max_graphs), UserWarning, stacklevel=4)
            graph = Graph(axis=axis_of_states(arguments))
        elif graph is None or graph.run is None:
            again = graph is not None
            graph = graph_of(inner, arguments, backend, sizes, donate=donate, again=again)
        step = functools.partial(inner, *args, **kwargs)
        seen, returned = graph(step, arguments, is_new=is_new)
        if seen:
            given_up.append(seen)
            warnings.warn(_OTHERWISE.format(seen), UserWarning, stacklevel=4)
        elif is_new and (graph.changes or seen == ""):
            graphs[:] = [*(one for one in graphs if one is not found), (key, graph)]
        return returned

    options = {} if backend == "inductor" else {"backend": backend}
    return Step("compile", fn, around, options=options)


_Known = tuple[Any, Graph]


def _known(graphs: list[_Known], key: Any, tensors: Sequence[Tensor]) -> _Known | None:
    """Return the graph of this key, if all that it reads is as it was."""
    alike = (one for one in graphs if one[0] == key)
    holds = (one for one in alike if (r := one[1].reads) is None or r.are_as_before(tensors))
    return next(holds, None)


def _require_real_ranks() -> None:
    if current_ranks() is not None:
        raise PhaseError(
            "a compiled step on virtual ranks.",
            cause="fzero.simulate around fzero.compile.",
            fix="simulate the step itself; compile it for one process or for torchrun.",
        )


def _check(fn: Callable[..., Any], backend: str, **numbers: int) -> None:
    right = "fzero.compile(step), once"
    require_order("compile", fn, never_around=("compile", "simulate"), right=right)
    bad = [f"{name}={number!r}" for name, number in numbers.items() if not is_count(number, 0)]
    bad += [] if backend in COMPILERS else [f"backend={backend!r}"]
    if bad:
        raise LayoutError(
            f"compile: {', '.join(bad)}.",
            cause="a number that is no count, or another compiler.",
            fix=f"give numbers of at least 0, and one of {sorted(COMPILERS)}.",
        )


_MANY = explain(
    "compile: there are {0} graphs, and these arguments need another one: the step itself runs.",
    cause="batches of many shapes; an argument, or a variable that a function of the step reads, "
    "that is another number or tensor in each call.",
    fix="pad batches to few shapes, pass numbers as tensors, write new values into a tensor that "
    "is held (x.copy_(new)), or raise max_graphs.",
)


_OTHERWISE = explain(
    "compile: the step itself runs from now on: {0}.",
    cause="what a graph does not have: numbers of Python's random or a clock, large tables that "
    "Python reads, tensors that the loss writes, generators that it hides; or an op that gives "
    "other bits in each run.",
    fix="pass what changes as a tensor, draw random numbers by torch, and return what is to be "
    "kept; or leave fzero.compile out.",
)
