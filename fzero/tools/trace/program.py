"""Record the step of one rank by make_fx: the graph, its inputs and its outputs.

The rank is abstract (`fzero.context.current_rank.abstract_rank`): what is recorded is what it
does among
any number of ranks, and each collective is one op of the graph.
"""

from __future__ import annotations

import contextvars
import dataclasses
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import optree
import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.collectives import CollectiveLog, count_collectives
from fzero.context.current_rank import abstract_rank
from fzero.errors import PhaseError
from fzero.machine.placeholder import LazyParam
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, Setup, TrainState
from fzero.tools.trace.found import AsFound
from fzero.tools.trees import map_tensors, tensors_in
from fzero.transforms.models import flatten_states, is_state
from fzero.transforms.pipeline import Step

ASKED_OF_FAKE = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of fake tensors where values are needed. Meta tensors raise errors of any type."""

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

    @property
    def returned(self) -> Any:
        """What the step returns, with 0 in the place of each leaf."""
        leaves: Any = [0] * self.result.num_leaves
        return optree.tree_unflatten(self.result, leaves)


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
    # What is under torch.compile is recorded as the function that it is.
    config: Any = sys.modules.get("torch._dynamo.config")
    plain = nullcontext() if config is None else config.patch(error_on_nested_fx_trace=False)
    try:
        with abstract_rank(rank, axis.size), unfused_recurrence(), plain:
            with faked:
                arguments = map_tensors(
                    lambda x: faked.made.note(faked.from_tensor(x)),
                    on_axes(arguments, Axis.as_virtual),
                )
            return _recorded(step, _scheduled(step, arguments, rank, found), rank, found)
    except ASKED_OF_FAKE as error:
        wrong = reads_values("traced", error)
        wrong.add_note(f"(raised while rank {rank} of {axis.size} was traced)")
        raise wrong from error
    except Exception as error:
        error.add_note(f"(raised while rank {rank} of {axis.size} was traced)")
        raise


def on_axes(tree: Any, axis_of: Callable[[Axis], Axis]) -> Any:
    """Return a pytree whose states are on other axes: axis_of that of each."""

    def moved(node: Any) -> Any:
        if not is_state(node):
            return node
        axis = axis_of(node.setup.axis)
        return node.replace(setup=dataclasses.replace(node.setup, axis=axis))

    return optree.tree_map(moved, tree, is_leaf=is_state, namespace=NAMESPACE)


def _scheduled(step: Callable[..., Any], arguments: Any, rank: int, found: AsFound) -> Any:
    """Return the arguments with the schedule of a first step in their states."""
    states, treespec = flatten_states("trace", arguments[0])
    if not any(one.setup.gathers_by_unit and not one.schedule.passes for one in states):
        return arguments
    after = _recorded(step, arguments, rank, found).returned[0]
    pairs = zip(states, flatten_states("trace", after)[0], strict=True)
    made: Any = [one.replace(schedule=new.schedule) for one, new in pairs]
    return (optree.tree_unflatten(treespec, made), *arguments[1:])


def _recorded(step: Callable[..., Any], arguments: Any, rank: int, found: AsFound) -> RecordedStep:
    leaves, treespec = optree.tree_flatten(arguments, namespace=NAMESPACE)
    inputs = [x for x in leaves if isinstance(x, Tensor)]
    made: dict[str, Any] = {}

    def flat(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(x, Tensor) else x for x in leaves]
        modules = _Modules()
        enters = register_module_forward_pre_hook(lambda module, _: modules.enter(module))
        leaves_it = register_module_forward_hook(lambda *_: modules.leave(), always_call=True)
        with enters, leaves_it, _Mark(modules):
            returned = step(*optree.tree_unflatten(treespec, filled))
        outs, made["result"] = optree.tree_flatten(returned, namespace=NAMESPACE)
        made["others"] = tuple(None if isinstance(x, Tensor) else x for x in outs)
        made["paths"] = _paths(returned, _RESULT)
        return tensors_in(returned)

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


_ARGUMENTS = ("state", "args")
_RESULT = ("state", "aux")


def _paths(tree: Any, names: tuple[str, str]) -> tuple[str, ...]:
    """Return the path of each tensor, in the first of a tuple or in the rest."""
    found, leaves = [], optree.tree_leaves(tree, namespace=NAMESPACE)
    accessors = optree.tree_accessors(tree, namespace=NAMESPACE)
    for accessor, leaf in zip(accessors, leaves, strict=True):
        if isinstance(leaf, Tensor):
            first, rest = accessor[0].entry, accessor[1:]
            single = names is _RESULT and first == 1
            head = names[0] if first == 0 else names[1] if single else f"{names[1]}[{first - 1}]"
            found.append(rest.codify(head))
    return tuple(found)


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


BACKWARD = "backward"
MODULE = "module"
"""What is noted on a node, under "custom" of its `meta`: whether autograd runs it, and in which
module it is."""


class _Mark(TorchDispatchMode):
    """Mark each recorded op with its module, and with whether autograd runs it."""

    def __init__(self, modules: _Modules) -> None:
        super().__init__()
        self._modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, LazyParam) for kind in types):
            return NotImplemented  # a placeholder handles it first; the ops it calls come back
        inside = torch._C._current_autograd_node() is not None
        fx_traceback.current_meta["custom"] = {BACKWARD: inside, MODULE: self._modules.here()}
        return func(*args, **(kwargs or {}))


class _Modules:
    """Stacks of modules in their forward, by thread, and the module of each autograd node.

    autograd numbers its nodes as they are created, before the op of the forward runs; in a
    backward the running node has that number.
    """

    def __init__(self) -> None:
        self._inside: dict[int, list[str]] = defaultdict(list)
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # references, so that their ids are not used again
        self._of_node: dict[int, str] = {}

    def enter(self, module: nn.Module) -> None:
        """Push a module that begins its forward. Names are paths in the outermost one."""
        inside = self._inside[get_ident()]
        if not inside and id(module) not in self._names:  # False in a recomputation of a checkpoint
            self._roots.append(module)
            self._names.update((id(part), name) for name, part in module.named_modules())
        inside.append(self._names.get(id(module)) or type(module).__name__)

    def leave(self) -> None:
        """Pop a module that ends its forward."""
        if inside := self._inside[get_ident()]:
            inside.pop()

    def here(self) -> str:
        """Return the name of the module of the next op; "" outside of all modules."""
        inside = self._inside[get_ident()]
        node: Any = torch._C._current_autograd_node()
        if not inside and node is not None:
            return self._of_node.get(node._sequence_nr(), "")
        name = inside[-1] if inside else ""
        self._of_node.setdefault(torch.autograd._get_sequence_nr() - 1, name)
        return name


@contextmanager
def unfused_recurrence() -> Iterator[None]:
    """In this block `nn.LSTM`, `nn.GRU` and `nn.RNN` run as matrix products, also if recomputed.

    A fused kernel of mkldnn or cuDNN keeps a workspace for its backward of which only that kernel
    knows the size. A graph with it neither runs nor compiles, and does not say what is computed.
    Which kernels there are is a setting of the process: it is changed while such a module runs.
    """
    settings: list[tuple[bool, bool]] = []

    def before(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.RNNBase):
            settings.append((torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()))
            _set(mkldnn=False, cudnn=False)

    def after(module: nn.Module, _: Any, __: Any) -> None:
        if isinstance(module, nn.RNNBase) and settings:
            mkldnn, cudnn = settings.pop()
            _set(mkldnn=mkldnn, cudnn=cudnn)

    enters = register_module_forward_pre_hook(before)
    with enters, register_module_forward_hook(after, always_call=True):
        yield


def _set(*, mkldnn: bool, cudnn: bool) -> None:
    torch._C._set_mkldnn_enabled(mkldnn)
    torch._C._set_cudnn_enabled(cudnn)


def require_recordable(tool: str, step: Any, states: Sequence[TrainState]) -> None:
    """Raise `PhaseError` for a step that no graph has, by the name of what is in its way."""
    encoded = [one.setup.optimizer for one in states]
    if any(one.setup.logical is not None for one in states):
        what, cause = "logical ranks", "a rank runs several, one after another, on their own rows"
        fix = "shard the step without logical_ranks=; the numbers are those of as many ranks"
    elif any(getattr(getattr(x, "precision", None), "encoding", None) is not None for x in encoded):
        what = "states of 8 bits or fewer"
        cause = "state_dtype=codec, whose kernels are in no graph"
        fix = "make the state with state_dtype=None"
    elif isinstance(step, Step) and "check_finite" in step.names():
        what, cause = "fzero.check_finite", "it reads values, to raise where one is not finite"
        fix = "leave check_finite out of the step that is recorded"
    else:
        return
    raise PhaseError(f"{tool}: the step has {what}.", cause=f"{cause}.", fix=f"{fix}.")


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


# The nodes of a recorded graph.

COLLECTIVES = "fzero"
"""The namespace of the ops that communicate."""

UPDATE = torch.ops.fzero_optim.update.default
"""The op that is the kernel of an optimizer."""

RATE = torch.ops.fzero_optim.schedule.default
"""The op that asks a schedule for its number."""

SAME = tuple(
    getattr(torch.ops.aten, name).default for name in ("detach", "lift_fresh_copy", "_unsafe_view")
)
"""Ops that give the values of their argument."""


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the input nodes of the graph."""
    return [node for node in nodes if node.op == "placeholder"]


def is_item(node: fx.Node) -> bool:
    """Return whether a node only selects one of several results of another node."""
    return getattr(node.target, "__name__", "") == "getitem"


def is_op(node: fx.Node) -> bool:
    """Return whether a node is an op of the trace."""
    return node.op == "call_function" and not is_item(node)


def root_of(node: fx.Node) -> fx.Node:
    """Return the node whose elements a view has; of another node, itself."""
    while True:
        one: Any = node
        of: Any = one.args[0] if is_item(node) else one
        if not is_op(of) or not (of.target in SAME or getattr(of.target, "is_view", False)):
            return node
        if not isinstance(of.args[0], fx.Node):  # a constant: lift_fresh_copy(2j)
            return node
        node = of.args[0]


def is_collective(node: fx.Node) -> bool:
    """Whether a node is an op that communicates."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == COLLECTIVES


def in_module(node: fx.Node) -> str:
    """Return the module of an op; "" outside of all modules."""
    return str(node.meta.get("custom", {}).get(MODULE, ""))


def ran_by_autograd(node: fx.Node) -> bool:
    """Return whether autograd ran a node."""
    return bool(node.meta.get("custom", {}).get(BACKWARD))
