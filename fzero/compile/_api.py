"""`compile`: a step whose graph runs in its place."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import optree
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from fzero._modes import in_transform, is_recorded, wants_graph
from fzero.collectives import channel_of
from fzero.compile._passes import (
    gather_early,
    merge_collectives,
    rematerialize,
    wait_late,
    without_writes,
    write_back,
)
from fzero.compile._segments import Action, actions_of
from fzero.errors import LayoutError, PhaseError, explain
from fzero.mesh import Axis
from fzero.state import NAMESPACE, TrainState
from fzero.trace._ops import is_collective
from fzero.trace._program import Program, record
from fzero.transforms._donate import give_back, take_over
from fzero.transforms._pipeline import P, R, Step, require_order
from fzero.transforms._states import flatten_states, is_state
from fzero.virtual import current_ranks, is_abstract

Backend = Literal["inductor", "eager"]
MERGED_BYTES = 2**20
EARLY_BYTES = 8 * 2**20


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
    schedule of stage 3, or options of the step that changed are another graph.

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
    _check(backend, max_graphs, bucket_bytes, gather_bytes)
    require_order(
        "compile", fn, never_around=("compile", "simulate"), right="fzero.compile(step), once"
    )
    graphs: list[tuple[Any, Compiled]] = []
    donate = _donates(fn)

    def around(inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        arguments: Any = (*args, kwargs)
        if is_abstract() or in_transform() or is_recorded(()) or wants_graph(_leaves(arguments)):
            return inner(*args, **kwargs)
        _require_real_ranks()
        key = _key(arguments)
        found = next((one for known, one in graphs if known == key), None)
        if found is None and len(graphs) >= max_graphs:
            warnings.warn(_MANY.format(max_graphs), UserWarning, stacklevel=4)
            return inner(*args, **kwargs)
        if found is None:
            axis = _axis(arguments)
            program = record(_with_keywords(inner), arguments, axis, axis.rank)
            program = replace(program, graph=without_writes(program.graph))
            _optimize(program.graph.graph, bucket_bytes, gather_bytes)
            if donate:
                write_back(program.graph.graph, _same_places(program))
            found = _compiled(program, axis, backend, donate=donate)
            graphs.append((key, found))
        return found(arguments)

    options = {} if backend == "inductor" else {"backend": backend}
    return Step("compile", fn, around, options=options)


def _donates(fn: Any) -> bool:
    """Whether the state that the step is given is used up by it: what `shard` says."""
    if not isinstance(fn, Step):
        return False
    return fn.options.get("donate", False) if fn.name == "shard" else _donates(fn.inner)


def _same_places(program: Program) -> list[tuple[int, int]]:
    """Which input and which output are the same buffer of a state, before and after the step."""
    where = {path: i for i, path in enumerate(program.inputs) if path.startswith("state")}
    pairs = ((where.get(path), i) for i, path in enumerate(program.outputs))
    return [(i, k) for i, k in pairs if i is not None]


def _with_keywords(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: inner(*arguments[:-1], **arguments[-1])


def _optimize(graph: fx.Graph, bucket_bytes: int, gather_bytes: int) -> None:
    gather_early(graph, most_bytes=gather_bytes)
    wait_late(graph)
    merge_collectives(graph, bucket_bytes=bucket_bytes)
    rematerialize(graph)
    graph.lint()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph as actions, and what stands around it."""

    actions: tuple[Action, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    result: Any  # the structure of what the step returns
    others: tuple[Any, ...]  # its leaves that are no tensors
    axis: Axis
    said: str  # what ranks must have in common to run it together
    donate: bool

    def __call__(self, arguments: Any) -> Any:
        """Run it on real tensors."""
        channel = channel_of(self.axis)
        if channel is not None:
            channel.call(self.said)
        given = arguments[0]
        taken = take_over(given) if self.donate else given
        env = dict(zip(self.inputs, _tensors((taken, *arguments[1:])), strict=True))
        whole = True  # nothing was written into the old state
        try:
            with torch.no_grad():
                for action in self.actions:
                    whole = whole and not getattr(action, "writes", False)
                    action(env)
        except BaseException:
            if self.donate and whole:
                give_back(given, taken)
            raise
        rest = iter(self.outputs)
        leaves = [env[next(rest)] if x is _TENSOR else x for x in self.others]
        return optree.tree_unflatten(self.result, leaves)


_TENSOR = object()


def _compiled(program: Program, axis: Axis, backend: Backend, *, donate: bool) -> Compiled:
    graph = program.graph
    channel = channel_of(axis)
    over = axis if channel is None else channel.over(axis)
    axes = {one.name: one for one in (over.replicas, over.shards, over)}
    nodes = list(graph.graph.nodes)
    lines = [f"{node.target} {node.args[1:]}" for node in nodes if is_collective(node)]
    return Compiled(
        actions=actions_of(graph, axes, _COMPILERS[backend]),
        inputs=tuple(node.name for node in nodes if node.op == "placeholder"),
        outputs=tuple(node.name for node in nodes[-1].args[0]),
        result=_on(axis, program),
        others=tuple(_TENSOR if x is None else x for x in program.others),
        axis=axis,
        donate=donate,
        said=f"compiled step {zlib.crc32(repr(lines).encode())}",
    )


def _on(axis: Axis, program: Program) -> Any:
    """The structure of the result, its states on the ranks that run it."""
    leaves: Any = [0] * program.result.num_leaves
    tree: Any = optree.tree_unflatten(program.result, leaves)

    def moved(node: Any) -> Any:
        if not is_state(node):
            return node
        return node.replace(setup=replace(node.setup, axis=axis))

    real: Any = optree.tree_map(moved, tree, is_leaf=is_state, namespace=NAMESPACE)
    return optree.tree_structure(real, namespace=NAMESPACE)


def _by_inductor(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    made = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in examples
    ]
    # The modes are off, in which the compiler would see its tensors; dropout is that of torch.
    with torch.no_grad(), _disable_current_modes(), config.patch(fallback_random=True):
        run: Any = compile_fx(graph, made)
    return run


def _by_ops(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
    return graph


_COMPILERS: dict[Backend, Any] = {"inductor": _by_inductor, "eager": _by_ops}


def _tensors(arguments: Any) -> list[Tensor]:
    return [x.detach() for x in _leaves(arguments) if isinstance(x, Tensor)]


def _leaves(arguments: Any) -> list[Any]:
    return optree.tree_leaves(arguments, namespace=NAMESPACE)


def _key(arguments: Any) -> Any:
    """What a graph is made for: the structure, the numbers, and what kind of tensors."""
    leaves, treespec = optree.tree_flatten(arguments, namespace=NAMESPACE)
    return treespec, [_kind(x) if isinstance(x, Tensor) else x for x in leaves]


def _kind(x: Tensor) -> Any:
    return tuple(x.shape), x.stride(), x.dtype, x.device


def _axis(arguments: Any) -> Axis:
    states: Sequence[TrainState] = flatten_states("compile", arguments[0])[0]
    axes = {state.setup.axis for state in states}
    if len(axes) > 1:
        raise LayoutError(
            explain(
                f"compile: the states are on {len(axes)} meshes.",
                cause="models that are sharded over other groups of ranks.",
                fix="put them on one mesh, or run the step without fzero.compile.",
            )
        )
    for state in states:
        groups = state.setup.optimizer.param_groups(state.setup.layout.leaves, 0)
        if groups.instance is not None:
            raise LayoutError(
                explain(
                    "compile: the options of the optimizer are read from a "
                    f"{type(groups.instance).__name__} at each update.",
                    cause="fzero.optim.from_torch(instance): a scheduler would change them, and a "
                    "graph would not see it.",
                    fix="use a rule of fzero.optim with a number as its lr.",
                )
            )
    return axes.pop()


def _require_real_ranks() -> None:
    if current_ranks() is not None:
        raise PhaseError(
            explain(
                "a compiled step on virtual ranks.",
                cause="fzero.simulate around fzero.compile.",
                fix="simulate the step itself; compile it for one process or for torchrun.",
            )
        )


def _check(backend: str, max_graphs: int, bucket_bytes: int, gather_bytes: int) -> None:
    counts = {"max_graphs": max_graphs, "bucket_bytes": bucket_bytes, "gather_bytes": gather_bytes}
    bad = [f"{name}={x!r}" for name, x in counts.items() if type(x) is not int or x < 0]
    bad += [] if backend in _COMPILERS else [f"backend={backend!r}"]
    if bad:
        raise LayoutError(
            explain(
                f"compile: {', '.join(bad)}.",
                cause="a number that is no count, or another compiler.",
                fix=f"give numbers of at least 0, and one of {sorted(_COMPILERS)}.",
            )
        )


_MANY = explain(
    "compile: there are {0} graphs, and these arguments need another one: the step itself runs.",
    cause="batches of many shapes, or an argument that is another number in each call.",
    fix="pad batches to few shapes, pass numbers as tensors, or raise max_graphs.",
)
