"""Record the step of one rank by make_fx: the graph, its inputs and its outputs.

The rank is abstract (`fzero.context.here.abstract_rank`): what is recorded is what it does among
any number of ranks, and each collective is one op of the graph.
"""

from __future__ import annotations

import contextvars
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.collectives import CollectiveLog, count_collectives
from fzero.context.here import abstract_rank
from fzero.errors import PhaseError
from fzero.machine.placeholder import LazyParam
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, Setup, TrainState
from fzero.tools.trace._modules import Modules, followed_modules
from fzero.tools.trace.found import AsFound, RecordMode
from fzero.tools.trace.recurrent import unfused_recurrence
from fzero.transforms.pipeline import Step
from fzero.transforms.states import flatten_states, is_state

BACKWARD = "backward"
MODULE = "module"
"""What the recorder notes on a node, under "custom" of its `meta`: whether autograd runs it, and in
which module it is."""


_ENTRY = r"""\[(?:'[^']*'|"[^"]*"|[^\]]*)\]|\.\w+"""
FIELD = re.compile(
    rf"^(state(?:{_ENTRY})*?)\.(params|optimizer|gradients|window|step|scale)\b(\.gathered\b)?"
)
"""The state that a path is in, the field of it, and whether that is of gathered parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A recorded step.

    graph: its inputs are the tensors among the arguments, its outputs those of the result.
    """

    graph: fx.GraphModule
    log: CollectiveLog
    inputs: tuple[str, ...]  # where each input is among the arguments: "state.params.flats[0]"
    outputs: tuple[str, ...]
    result: optree.PyTreeSpec  # of what the step returns
    others: tuple[Any, ...]  # the leaves of the result that are no tensors; None for a tensor
    states: tuple[TrainState, ...]  # without numbers, as they go in
    rank: int

    @property
    def setups(self) -> dict[str, Setup]:
        """The setup of each state, by its path."""
        heads = dict.fromkeys(found[1] for path in self.inputs if (found := FIELD.match(path)))
        return dict(zip(heads, (state.setup for state in self.states), strict=True))


def record_step(
    step: Callable[..., Any], arguments: tuple[Any, ...], axis: Axis, rank: int, found: AsFound
) -> RecordedStep:
    """Record `step(*arguments)` as rank `rank` of `axis` runs it; the first argument has the state.

    A state of stage 3 without a schedule first gets one, so that the graph is that of a steady
    step. found: what the step reaches, entered; each record begins and ends with it.

    Raises `PhaseError` if the step reads a value, for there is none.
    """
    faked = found.mode()
    require_recordable(found.tool, step, flatten_states(found.tool, arguments[0])[0])
    try:
        with abstract_rank(rank, axis.size), unfused_recurrence(), _explained(), _uncompiled():
            with faked:
                arguments = _faked(faked, _on_abstract(arguments))
            return _recorded(step, _scheduled(step, arguments, rank, found), rank, found)
    except Exception as error:
        error.add_note(f"(raised while rank {rank} of {axis.size} was traced)")
        raise


def _recorded(step: Callable[..., Any], arguments: Any, rank: int, found: AsFound) -> RecordedStep:
    leaves, treespec = optree.tree_flatten(arguments, namespace=NAMESPACE)
    inputs = [x for x in leaves if isinstance(x, Tensor)]
    made: dict[str, Any] = {}

    def flat(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(x, Tensor) else x for x in leaves]
        with followed_modules() as modules, _Mark(modules):
            returned = step(*optree.tree_unflatten(treespec, filled))
        outs, made["result"] = optree.tree_flatten(returned, namespace=NAMESPACE)
        made["others"] = tuple(None if isinstance(x, Tensor) else x for x in outs)
        made["paths"] = _paths(returned, _RESULT)
        return [x for x in outs if isinstance(x, Tensor)]

    with found.record(), count_collectives() as log, fx_traceback.preserve_node_meta():
        record: Any = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
        graph = without_unused(contextvars.copy_context().run(record, *inputs))
    return RecordedStep(
        graph=graph,
        log=log,
        inputs=_paths(arguments, _ARGUMENTS),
        outputs=made["paths"],
        result=made["result"],
        others=made["others"],
        states=tuple(flatten_states("trace", arguments[0])[0]),
        rank=rank,
    )


def without_unused(graph: fx.GraphModule) -> fx.GraphModule:
    """Remove unread ops of ATen, but no draws: the numbers of a later one depend on them.

    Others stay: in collectives other ranks take part, and of a custom op nothing is known.
    """
    for node in reversed(graph.graph.nodes):
        may_go = node.op == "get_attr" or (node.op == "call_function" and _may_go(node.target))
        if may_go and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _may_go(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return True  # it takes one of several results
    draws = torch.Tag.nondeterministic_seeded in target.tags
    known = target.namespace in ("aten", "fzero_optim")
    return known and not target._schema.is_mutable and not draws


def _on_abstract(arguments: Any) -> Any:
    """Put the states on the axis of the abstract rank."""

    def moved(node: Any) -> Any:
        if not is_state(node):
            return node
        axis = node.setup.axis.as_virtual()
        return node.replace(setup=dataclasses.replace(node.setup, axis=axis))

    return optree.tree_map(moved, arguments, is_leaf=is_state, namespace=NAMESPACE)


def _faked(mode: RecordMode, arguments: Any) -> Any:
    def fake(x: Any) -> Any:
        return mode.made.note(mode.from_tensor(x)) if isinstance(x, Tensor) else x

    return optree.tree_map(fake, arguments, namespace=NAMESPACE)


def _scheduled(step: Callable[..., Any], arguments: Any, rank: int, found: AsFound) -> Any:
    """Return the arguments with the schedule of a first step in their states."""
    states, treespec = flatten_states("trace", arguments[0])
    if not any(one.setup.gathers_by_unit and not one.schedule.passes for one in states):
        return arguments
    result = _recorded(step, arguments, rank, found).result
    leaves: Any = [0] * result.num_leaves
    returned: Any = optree.tree_unflatten(result, leaves)
    pairs = zip(states, flatten_states("trace", returned[0])[0], strict=True)
    known: Any = optree.tree_unflatten(
        treespec, [one.replace(schedule=new.schedule) for one, new in pairs]
    )
    return (known, *arguments[1:])


class _Mark(TorchDispatchMode):
    """Mark each recorded op with its module, and with whether autograd runs it."""

    def __init__(self, modules: Modules) -> None:
        super().__init__()
        self._modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, LazyParam) for kind in types):
            return NotImplemented  # a placeholder handles it first; the ops it calls come back
        inside = torch._C._current_autograd_node() is not None
        noted = {BACKWARD: inside, MODULE: self._modules.here()}
        fx_traceback.current_meta["custom"] = noted
        return func(*args, **(kwargs or {}))


_ARGUMENTS = ("state", "args")
_RESULT = ("state", "aux")


def _paths(tree: Any, names: tuple[str, str]) -> tuple[str, ...]:
    """Return the path of each tensor, in the first of a tuple or in the rest."""
    found = []
    leaves = optree.tree_leaves(tree, namespace=NAMESPACE)
    for accessor, leaf in zip(
        optree.tree_accessors(tree, namespace=NAMESPACE), leaves, strict=True
    ):
        if isinstance(leaf, Tensor):
            first, rest = accessor[0].entry, accessor[1:]
            single = names is _RESULT and first == 1
            head = names[0] if first == 0 else names[1] if single else f"{names[1]}[{first - 1}]"
            found.append(rest.codify(head))
    return tuple(found)


@contextmanager
def _explained() -> Iterator[None]:
    """Convert errors about missing values to `PhaseError`."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise reads_values("traced", error) from error


def require_recordable(tool: str, step: Any, states: Sequence[TrainState]) -> None:
    """Raise `PhaseError` for a step that no graph has, by the name of what is in its way."""
    encoded = [one.setup.optimizer for one in states]
    if any(one.setup.logical is not None for one in states):
        what, cause = "logical ranks", "a rank runs several, one after another, on their own rows"
        fix = "shard the step without logical_ranks=; the numbers are those of as many ranks"
    elif any(getattr(getattr(x, "precision", None), "encoding", None) is not None for x in encoded):
        what, cause = (
            "states of 8 bits or fewer",
            "state_dtype=codec, whose kernels are in no graph",
        )
        fix = "make the state with state_dtype=None"
    elif isinstance(step, Step) and "check_finite" in step.names():
        what, cause = "fzero.check_finite", "it reads values, to raise where one is not finite"
        fix = "leave check_finite out of the step that is recorded"
    else:
        return
    raise PhaseError(f"{tool}: the step has {what}.", cause=f"{cause}.", fix=f"{fix}.")


def _uncompiled() -> AbstractContextManager[Any]:
    """Record a function under torch.compile as the function that it is."""
    config = sys.modules.get("torch._dynamo.config")
    return nullcontext() if config is None else config.patch(error_on_nested_fx_trace=False)


def reads_values(done: str, op: Any) -> PhaseError:
    """Return the error for a step that needs values while it is `done` ("traced", "planned")."""
    return PhaseError(
        f"the step reads values of a tensor while it is {done} ({op}).",
        cause=".item(), float(x), `if x > 0:`, a result whose shape depends on values (x[mask], "
        "nonzero): experts that each take the rows which chose them, for one. Or an optimizer that "
        "reads them in its update, as Adafactor does.",
        fix="use torch.where, keep it a tensor, give each expert a number of rows that is known "
        "(topk of the tokens, a capacity), or pass the number as an argument of the step. In the "
        "place of such an optimizer give one that keeps as much, and measure it in a run.",
    )
