"""`prove`: a step, a state and its arguments -> a proof about the step on any number of ranks."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from fzero.context.current_rank import abstract_rank
from fzero.context.modes import in_transform, is_recorded
from fzero.errors import AxisError, FzeroError, LayoutError, PhaseError
from fzero.errors.check import is_count, is_positive, require
from fzero.machine.partition import assemble
from fzero.machine.placeholder import LazyParam
from fzero.optim.recorded import SCHEDULES
from fzero.state import NAMESPACE, Placement, TrainState
from fzero.state.progress import Phase
from fzero.tools.prove import read
from fzero.tools.prove.ops import AGAIN, GRADIENT
from fzero.tools.prove.terms import (
    DEFAULT_S,
    Budget,
    Interpretation,
    OutOfBudget,
    Stretch,
    Symbolic,
    Terms,
    cut,
    exact,
    joined,
    text_of,
)
from fzero.tools.trace.draws import RecordedDraws
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.program import (
    ASKED_OF_FAKE,
    RATE,
    UPDATE,
    RecordedStep,
    inputs_of,
    record_step,
    require_recordable,
)
from fzero.tools.trace.schedules import facts_of
from fzero.tools.trees import map_tensors
from fzero.transforms.models import flatten_states, map_states
from fzero.transforms.observe import observe
from fzero.transforms.pipeline import Step, describe_function
from fzero.transforms.simulate import require_stacked


def prove(
    step: Callable[..., Any],
    state: Any,
    args: Any = (),
    *,
    world: int | None = None,
    budget_s: float = DEFAULT_S,
) -> Proof:
    """Prove, for all values: new state on W ranks = update(state, (1 / W) sum_r gradient(b_r)).

    `update` and `gradient` are what the step does on one rank alone, b_r is the batch of rank r.

    Programs are recorded as `fzero.trace` does it: of one rank alone, and of ranks among W. Each
    value is read as an expression over parameters, slots and batches: whole, each rank's part of a
    whole, made of a rank's own batch, or a sum over ranks. Where both programs make the same
    expression of every leaf of the new state the theorem holds over the reals, and prints with
    what it assumes. A leaf that is not shown is named, with the line of the graph at which the
    ranks begin to do what one rank does not explain; it may be right all the same.

    Args:
        step: (state, *args) -> (state, aux) with a `fzero.shard`; or `fzero.simulate` of one.
        state: as the step is given it, between two updates. No value of it is read.
        args: the further arguments, a tuple; what is no tuple is the only one. Of a simulated step
            stacked ones, of which rank 0's are read.
        world: W, any number of ranks; default that of the state.
        budget_s: CPU seconds for each rank whose program is recorded. Where they are spent the step
            is not proved, and the op is named at which they were; autograd is let finish first.

    Returns:
        A `Proof`; true if all is shown. Not a collective.

    Raises:
        LayoutError: for a step without `fzero.shard`, a `world` that is no count, batches that are
            not stacked.
        AxisError: for a mesh of two dims, and for local updates.
        PhaseError: for a state with gradients; in a trace or transform; and as `fzero.trace` does,
            for a step that reads values, and an optimizer that cannot be traced.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.shard(step_fn, stage=2)
        >>> state = step.init({"w": torch.ones(5)}, fzero.optim.sgd(1.0))
        >>> fzero.prove(step, state, torch.ones(5), world=1024).proved
        True
    """
    inner: Any = step.inner if isinstance(step, Step) and step.name == "simulate" else step
    if not isinstance(inner, Step) or inner.find_init() is None:
        raise LayoutError(
            f"prove: there is no fzero.shard in {describe_function(step)}.",
            cause="the function that shard is put around, or a step that was called already.",
            fix="fzero.prove(fzero.shard(step_fn, stage=2), state, batch).",
        )
    one, *_ = states = flatten_states("prove", state)[0]
    world = one.setup.axis.size if world is None else world
    require("prove: world", world, is_count, "at least 1")
    if any(x.setup.replicas > 1 or x.outer is not None for x in states):
        raise AxisError(
            f"prove: a state on {one.mesh}, with replicas or local updates.",
            cause="a mesh of two dims, or fzero.local.",
            fix="prove the step on one dim of ranks; try the other with fzero.certify.",
        )
    if in_transform() or is_recorded(()) or any(x.phase is not Phase.IDLE for x in states):
        raise PhaseError(
            "prove: inside of a trace or a transform, or with a state that has gradients.",
            cause="a call within a step.",
            fix="call it between two updates.",
        )
    require_recordable("prove", inner, states)
    given: Any = args if isinstance(args, tuple) else (args,)
    if inner is not step:
        require_stacked("prove", given, one.setup.axis.size)
        given = map_tensors(lambda x: x[0], given)
    require("prove: budget_s", budget_s, is_positive, "a number of seconds above 0")
    named = describe_function(inner)

    def refused(why: str, tensor: str = "state", line: str = "") -> Proof:
        claim = Claim(tensor=tensor, leaf="", why=why, line=line)
        return Proof(step=named, world=world, ranks=(), ops=(0, 0), claims=(claim,))

    for one in states:  # what no program of a rank shows, before one is recorded
        for name, slot in one.slots.items():
            own = slot.form.placement in (Placement.PARTIAL, Placement.OWNER)
            if slot.form.lifetime == "run" and own:
                why = "each rank has its own (Placement.PARTIAL, OWNER): it is no part of a state "
                return refused(f"{why}of one rank", f"state.slots[{name!r}]")
        for point in one.setup.policy.points:
            if getattr(point, "whole", False):
                why = f"{point.name} looks at whole leaves (needs=), each on its owner: a rank has "
                return refused(f"{why}the program of its own leaves")
    budget = Budget(budget_s, len(ranks_of(world)))
    with AsFound("prove", inner, state, given) as found:
        recorder = ProgramRecorder(inner, state, given, budget, found)
        noted = recorder.watch.noted
        try:
            alone = recorder.of(1, 0)
            ranks = (recorder.of(world, rank) for rank in ranks_of(world))
            proof = prove_programs(named, alone, ranks, world, budget=budget)
            # The ranks' programs were compared with each other; that of one rank with that of a
            # later call, in which torch has looked up what it wants to know.
            if proof and (node := same_program(alone, recorder.of(1, 0))) is not None:
                return refused("a later call has another program", line=line_of(node))
        except OutOfBudget as error:
            return refused(f"{error}")
        except Exception as error:
            if isinstance(error, FzeroError) or not noted:
                raise
            return refused("; ".join(noted))  # of which torch says something else
        if proof and noted:
            return refused("; ".join(noted))
        return replace(proof, local=tuple(sorted(recorder.local))) if proof else proof


# What is proved of a step, as a record that prints as a theorem.


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That a tensor of the new state is that of the one-rank step: shown, or not.

    tensor: its path, "state.params.flats". leaf: the parameter it belongs to, or "". why: it is not
    shown, or "". line: of the graph of a rank, where this begins.
    """

    tensor: str
    leaf: str
    why: str = ""
    line: str = ""

    @property
    def shown(self) -> bool:
        """Whether it is shown."""
        return not self.why


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A proof about a step on `world` ranks, or what is missing for one.

    claims: one for each leaf in each buffer of the new state, and for each number in it. ranks:
    those whose programs were recorded. ops: of the programs of one rank alone, and of a rank.
    local: the transforms that change a rank's gradients before they cross ranks. beside: what is
    shown of each tensor that is returned beside the state, which is no part of the theorem.
    """

    step: str
    world: int
    ranks: tuple[int, ...]
    ops: tuple[int, int]
    claims: tuple[Claim, ...]
    local: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def proved(self) -> bool:
        """Whether there are claims, and all are shown."""
        return bool(self.claims) and not self.unshown

    @property
    def unshown(self) -> tuple[Claim, ...]:
        """The claims that are not shown."""
        return tuple(claim for claim in self.claims if not claim.shown)

    def __bool__(self) -> bool:
        return self.proved

    def __str__(self) -> str:
        return "\n".join(_theorem(self) if self.proved else _missing(self))

    __repr__ = __str__


ASSUMED = (
    "numbers are real: nothing is rounded, NaN or infinite, nothing divides by 0, int64 does not "
    "overflow, and a constant is the simplest quotient that rounds to it; a cast to a dtype that "
    "does not hold the values is some function of each element, the same in both programs",
    "an op of ATen gives the same for the same operands, and all_gather, all_reduce and "
    "reduce_scatter join, sum, and sum and cut what ranks hand in",
    "a rule of fzero.optim makes each element of that element of its operands",
    "the gradient of a rank is what autograd makes of the loss that grad_and_reduce is given, with "
    "the hooks and autograd.Functions in it",
    "each rank draws random numbers of its own, and the n-th draw is the same in both programs",
    "the batches of all ranks have these shapes; the state is between two updates, and what is "
    "whole in it is the same on all ranks",
    "the step is this program in every call: it reads no clock, no file, and no counter of any "
    "make (in an object that it does not reach, an extension, a thread) that calls change",
    "the step reads and writes no raw address, and no memory of a tensor but by ops",
    "the step is this program on every rank, in every process and under every launcher: what it "
    "has from elsewhere (variables of the environment, modules, closures) is the same there",
    "the step is this program when it is not recorded: it does not ask whether it is",
)
"""What a proof takes for granted, a line each."""
_OTHERS = "the ranks that were not read are assumed to do the same, with their own numbers"
_MOST = 5


def _theorem(proof: Proof) -> Iterator[str]:
    of = f", of the gradients that `local` of {', '.join(proof.local)} returns" * bool(proof.local)
    yield f"Theorem, over the reals{of}. {_named(proof)}, from every state and all such batches:"
    what = "these gradients" if proof.local else "gradients"
    yield f"new state = update(state, mean over ranks of {what}), as of one rank alone."
    counts = Counter(claim.tensor if claim.leaf else "numbers" for claim in proof.claims)
    yield f"Shown of: {', '.join(f'{name} ({count})' for name, count in counts.items())}."
    if proof.beside:
        yield f"Returned beside it: {', '.join(proof.beside)}."
    yield _programs(proof)
    yield "Assumed:"
    rest = () if len(proof.ranks) == proof.world else (_OTHERS,)
    yield from (f"  {number}. {text}." for number, text in enumerate((*ASSUMED, *rest), 1))
    yield "What rounding does is not in it: fzero.certify looks at the bits."


def _missing(proof: Proof) -> Iterator[str]:
    missing = proof.unshown
    yield f"Not proved: {_named(proof)}. {len(missing)} of {len(proof.claims)} claims are open:"
    for claim in missing[:_MOST]:
        yield f"  {claim.tensor} {claim.leaf}: {claim.why}"
    if len(missing) > _MOST:
        yield f"  and {len(missing) - _MOST} more"
    lines = dict.fromkeys(x.line for x in missing if x.line)
    yield from (f"It begins at {line}" for line in lines)
    if proof.ranks:
        yield _programs(proof)


def _named(proof: Proof) -> str:
    return f"{proof.step} on {proof.world} rank{'s' if proof.world > 1 else ''}"


def _programs(proof: Proof) -> str:
    count = len(proof.ranks)
    every = f"each of the {count} ranks, all read" if count > 1 else "the rank"
    some = f"ranks {', '.join(map(str, proof.ranks))}, which were read; others were not"
    of = every if count == proof.world else some
    return f"Programs: {proof.ops[0]} ops of one rank alone; {proof.ops[1]} of {of}."


def line_of(node: fx.Node) -> str:
    """Return a node as a line of its graph: "line 7: add = aten.add.Tensor(x, 1)"."""
    number = list(node.graph.nodes).index(node) + 1
    named = [f"{key}={_shown(x)}" for key, x in node.kwargs.items()]
    target: Any = node.target
    if not hasattr(target, "overloadpacket"):
        target = getattr(target, "__name__", node.op)
    return f"line {number}: {node.name} = {target}({', '.join([*map(_shown, node.args), *named])})"


def _shown(x: object) -> str:
    text = f"[{', '.join(map(_shown, x))}]" if isinstance(x, list | tuple) else str(x)
    return text if len(text) <= 120 else f"{text[:117]}..."


# Record the programs of a step on one rank alone and on ranks among W.

MOST = 64
"""Of so many ranks all are recorded."""


def ranks_of(world: int) -> tuple[int, ...]:
    """Return the ranks whose programs are recorded: all up to 64, else 16 among them.

    Example:
        >>> ranks_of(3), ranks_of(1024)[:4], ranks_of(1024)[-2:]
        ((0, 1, 2), (0, 1, 2, 3), (1022, 1023))
    """
    if world <= MOST:
        return tuple(range(world))
    inner = (i * world // 12 for i in range(1, 11))
    return (0, 1, 2, 3, *inner, world - 2, world - 1)


class ProgramRecorder:
    """Records ranks of worlds, from new states with parameters of the shapes of `state`.

    watch: has noted what the step uses beside its arguments. local: the transforms that act before
    gradients cross ranks.
    """

    def __init__(self, step: Any, state: Any, args: Any, budget: Budget, found: AsFound) -> None:
        self._step, self._args, self._budget, self._found = step, args, budget, found
        self._given, self._treespec = flatten_states("prove", state)
        setups = [one.setup.optimizer for one in self._given]
        self._optimizers: Any = optree.tree_unflatten(self._treespec, setups)
        self._schedules: dict[int, list[Any]] = {}
        self.watch, self.local = Watch(), set[str]()

    def of(self, world: int, rank: int) -> RecordedStep:
        """Return the program of a rank among `world`. On one rank gradients are marked."""
        mode = self._found.mode()
        blank = [_params(mode, one) for one in self._given]
        params: Any = optree.tree_unflatten(self._treespec, blank)
        with self.watch.entered(), abstract_rank(rank, world):
            new = self._step.init(
                params, self._optimizers, initializer=lambda _, leaf: torch.empty_like(leaf)
            )
        if known := list(self._schedules.get(world, ())):  # that of the first rank is that of all
            new = map_states("prove", lambda one: one.replace(schedule=known.pop(0)), new)
        states = flatten_states("prove", new)[0]

        def mark(what: str, state: Any, value: Any) -> Any:
            if what != "gradient":
                return None
            points = state.setup.policy.points
            self.local.update(x.name for x in points if getattr(x, "local", None))
            return GRADIENT(value[1])

        step = observe(self._step, [mark] * len(states)) if world == 1 else self._step
        with self.watch.entered():
            warm = world in self._schedules  # torch looks up much as it first records
            calls = self._calls(step, self._budget.of_one(), warm=warm)
            made = record_step(calls, (new, *self._args), states[0].setup.axis, rank, self._found)
        self.watch.compare_draws()
        after = flatten_states("prove", made.returned[0])[0]
        if any(new.setup != old.setup for new, old in zip(after, made.states, strict=True)):
            self.watch.note("the new state has other options than the old one")
        self._schedules.setdefault(world, [one.schedule for one in made.states])
        return made

    def _calls(self, step: Any, budget: Budget, *, warm: bool) -> Any:
        """Return the step; where a call keeps something for the next one, that one follows."""

        def calls(*args: Any) -> Any:
            self.watch.begins(warm=warm)
            given: Any = args
            leaves, treespec = optree.tree_flatten(given, namespace=NAMESPACE)
            with self.watch.call(budget):
                one = step(*optree.tree_unflatten(treespec, leaves))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                if not self._found.changed():
                    return one
                kept = AsFound("prove", *self._found.roots)
                kept.look()
            AGAIN(next(x for x in leaves if isinstance(x, Tensor)))
            with self.watch.call(budget):
                other = step(*optree.tree_unflatten(treespec, leaves))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                if where := kept.changed():
                    self.watch.note(f"a call writes {where}, which the next call may read")
            return one[0], other[0]

        return calls


def _params(mode: FakeTensorMode, state: TrainState) -> Any:
    made: dict[int, Tensor] = {}
    for i, leaf in enumerate(state.setup.layout.leaves):
        meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        fake = FakeTensor(mode, meta, torch.device("cpu"))
        made[i] = fake if leaf.trainable else torch.nn.Parameter(fake, requires_grad=False)
    return assemble(state.setup.layout, made)


# What a step uses beside its arguments, while it is recorded: noted where that is cheap.
#
# Noted are reads of the environment and of torch.distributed's rank and world size, seeds, values
# of tensors that a step asked for and did without, and what a call leaves changed in the variables,
# attributes and containers that the step reaches.


class Watch:
    """Watches the thread by which it is entered.

    noted: what was seen, once each. warm: whether what libraries look up once is known to them.
    inside: whether the step runs now, and not what records it.
    """

    def __init__(self) -> None:
        self.noted: dict[str, None] = {}
        self.warm = self.inside = False
        self._rates: dict[int, Any] = {}
        self._draws: list[int | None] = []  # of this program: None, or the state that was set first
        self._first_draws: list[int | None] | None = None

    def note(self, what: str) -> None:
        """Keep what was seen."""
        self.noted.setdefault(what)

    def notes(self, what: str) -> None:
        """Keep what this thread does inside of the step."""
        if self.inside and threading.get_ident() == self._thread:
            self.note(what)

    def asks_for_rate(self, number: int) -> None:
        """A schedule is asked now: what it reads must be the same whenever it is."""
        facts = facts_of(SCHEDULES[number])
        if self._rates.setdefault(number, facts) != facts:
            self.note("the option lr reads other values, or is another function, in another call")

    def begins(self, *, warm: bool) -> None:
        """A program is recorded. warm: who reads the environment now is the step."""
        self.warm, self._draws = warm, []

    @contextmanager
    def call(self, budget: Budget) -> Iterator[None]:
        """Watch a call of the step op by op, within a budget, and then how it has drawn."""
        with _EachOp(self, budget) as drawn, _EachCall(self):
            self.inside = True
            try:
                yield
            finally:
                self.inside = False
        assert drawn.randomness is not None
        begins, draws, ends, constants = drawn.randomness
        if drawn.randomness.made:
            self.note("it draws random numbers from a generator of its own")
        elif constants:
            self.note("it seeds the random numbers of torch")
        stands = {id(generator): number for generator, number in begins}
        for generator, before, after in (*draws, *((*end, 0) for end in ends)):
            self._draws.append(None if stands.get(id(generator)) == before else before)
            stands[id(generator)] = after

    def compare_draws(self) -> None:
        """Note a program whose states are put back elsewhere among the draws than another's."""
        first = self._draws if self._first_draws is None else self._first_draws
        self._first_draws = first
        if first != self._draws and any(x is not None for x in (*first, *self._draws)):
            self.note("it sets the state of random numbers in other places than on one rank")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put what says what it is asked in the place of what a step may ask."""
        self._thread = threading.get_ident()
        environment, swap = os._Environ, torch.utils.swap_tensors

        def reader(asked: Any) -> Any:
            def reads(of: Any, *key: Any) -> Any:
                if self.warm:
                    named = key and isinstance(key[0], str | bytes)
                    self.notes(f"it reads os.environ{[os.fsdecode(key[0])] if named else ''}")
                return asked(of, *key)

            return reads

        def swapped(*tensors: Any) -> Any:
            self.notes("it swaps the memory of tensors, which is in no program")
            return swap(*tensors)

        names = ("__getitem__", "__iter__", "__len__")
        new: list[Any] = [(environment, x, reader(getattr(environment, x))) for x in names]
        new.append((torch.utils, "swap_tensors", swapped))
        new.append((c10d, "_world", _Groups(self, c10d._world)))
        old = [(of, name, getattr(of, name)) for of, name, _ in new]
        try:
            for one in new:
                setattr(*one)
            yield
        finally:
            for one in old:
                setattr(*one)


class _Groups:
    """What torch.distributed knows of groups of ranks, which says who asks."""

    def __init__(self, watch: Watch, of: Any) -> None:
        vars(self).update(_watch=watch, _of=of)

    def __getattr__(self, name: str) -> Any:
        self._watch.notes("it asks torch.distributed for its rank or for the number of ranks")
        return getattr(self._of, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of, name, value)


_ESCAPES: dict[Any, str] = {
    Tensor.data.__set__: "sets `.data` of a tensor",  # type: ignore[attr-defined]
    Tensor.numpy: "asks for `.numpy()`",
    Tensor.__array__: "asks for `.numpy()`",
    Tensor.tolist: "asks for `.tolist()`",
    Tensor.data_ptr: "asks for `.data_ptr()`",
    Tensor.untyped_storage: "asks for `.untyped_storage()`",
    Tensor.storage: "asks for `.storage()`",
    Tensor.__dlpack__: "asks for `.__dlpack__()`",
}
"""What is done to a tensor beside the ops of a program, and so is in no graph."""


def _has_values(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(x)


class _EachCall(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (what := _ESCAPES.get(func)) is not None and not _has_values(args[0]):
            self._watch.notes(f"it {what}, which is in no program")
        return func(*args, **(kwargs or {}))


class _EachOp(RecordedDraws):
    def __init__(self, watch: Watch, budget: Budget) -> None:
        super().__init__()
        self._watch, self._budget = watch, budget

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An error where torch asks for a device, or inside of autograd, would end the process.
        aten = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
        computes = aten and not func.is_view and not any(issubclass(x, LazyParam) for x in types)
        if computes and torch._C._current_autograd_node() is None:
            self._budget.check(f", at {func}")
        if func is RATE:
            self._watch.asks_for_rate(args[1])
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except ASKED_OF_FAKE:
            self._watch.note(f"it asks for a value ({func}) and goes on without")
            raise


# Are the programs of ranks one program, but for which part of a whole each takes?

OTHER_PROGRAMS = "ranks run other programs"
_CUT = (
    f"{OTHER_PROGRAMS}: their updates differ. Options of some leaves (decay_mask=, groups=) cut "
    "what each rank has of a flat at other elements, which is followed on 64 ranks and fewer. With "
    "more it is with stage=0, where ranks have all of a flat; at stage 3 with units=lambda path: "
    "path, where each leaf is a flat; and with the same options for all leaves"
)
_SELECT, _SLICE = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor


class ProgramComparison:
    """Compares programs with a first one, node by node, and keeps none of them.

    differs: the first node of the first program at which another one does something else. why: in
    words.
    """

    def __init__(self, first: RecordedStep) -> None:
        self._nodes, self._facts, self._ends = list(first.graph.graph.nodes), *_facts_of(first)
        self._selects = {node: node.args[2] for node in self._nodes if node.target is _SELECT}
        self._own = {node for node, index in self._selects.items() if index == first.rank}
        self._moves = set[fx.Node]()  # those that select other parts on other ranks
        self.differs: fx.Node | None = None
        self.why = OTHER_PROGRAMS

    def add(self, other: RecordedStep) -> None:
        """Compare one more."""
        facts, ends = _facts_of(other)
        nodes = list(other.graph.graph.nodes)
        for node, fact, its, found in zip(self._nodes, self._facts, nodes, facts, strict=False):
            if found != fact:
                self._note(node, cuts=_is_of_update(node) or _is_of_update(its))
                return
            if node in self._selects:
                index: Any = its.args[2]
                self._own -= {node} if index != other.rank else set()
                self._moves |= {node} if index != self._selects[node] else set()
        if len(nodes) != len(self._nodes) or ends != self._ends:
            self._note(self._nodes[-1])

    def _note(self, node: fx.Node, *, cuts: bool = False) -> None:
        order = self._nodes.index
        if self.differs is None or order(node) < order(self.differs):
            self.differs = node
            self.why = _CUT if cuts else OTHER_PROGRAMS

    def own_parts(self) -> frozenset[fx.Node]:
        """Return the nodes that select the part of their rank; what moves otherwise differs."""
        for node in self._moves - self._own:
            self._note(node)
        return frozenset(self._moves & self._own)


def same_program(one: RecordedStep, other: RecordedStep) -> fx.Node | None:
    """Return the first node of a program at which another one of the same rank differs."""
    comparison = ProgramComparison(one)
    comparison.add(other)
    comparison.own_parts()
    return comparison.differs or next(iter(comparison._moves), None)


def _is_of_update(node: fx.Node) -> bool:
    """Whether it is an update, or cuts what an update is given."""
    updates = [one for one in node.graph.nodes if one.target is UPDATE]
    given = {x for one in updates for x in one.all_input_nodes}
    return node in updates or (node in given and node.target is _SLICE)


def _facts_of(program: RecordedStep) -> tuple[list[Hashable], Hashable]:
    number = {node: i for i, node in enumerate(program.graph.graph.nodes)}

    def facts(node: fx.Node) -> Hashable:
        val = node.meta.get("val")
        made = val if isinstance(val, list | tuple) else [val]
        kinds = tuple((tuple(x.shape), x.dtype) for x in made if isinstance(x, Tensor))
        # Which part a select takes: see `ProgramComparison`.
        args = node.args[:2] if node.target is _SELECT else node.args
        held = read.digest(program.graph, node) if node.op == "get_attr" else None
        target = node.target if node.op == "call_function" else node.op
        return target, _plain(args, number), _plain(node.kwargs, number), kinds, held

    return [*map(facts, number)], (program.inputs, program.outputs)


def _plain(x: Any, number: Mapping[fx.Node, int]) -> Hashable:
    if isinstance(x, fx.Node):
        return "node", number[x]
    if isinstance(x, list | tuple):
        return tuple(_plain(one, number) for one in x)
    if isinstance(x, Mapping):
        return tuple(sorted((str(key), _plain(one, number)) for key, one in x.items()))
    return type(x).__name__, x.hex() if isinstance(x, float) else str(x)


# Compare what two programs make of a state: that of one rank alone, and that of ranks among W.


class _Side(NamedTuple):
    """One of the two programs, read; of all ranks that of the first, with what they make together.

    makers: what makes the outputs. outputs: what a call makes of the state. again: what the next
    call makes of the same state, if one keeps something for it.
    """

    ops: int
    inputs: Sequence[read.BufferPlace]
    values: read.ProgramRead
    stopped: tuple[fx.Node, str] | None
    makers: Mapping[read.Key, fx.Node]
    outputs: read.Values
    again: read.Values


def prove_programs(
    step: str,
    one_rank: RecordedStep,
    ranks: Iterable[RecordedStep],
    world: int,
    *,
    budget: Budget | None = None,
) -> Proof:
    """Return a proof that the programs of ranks among `world` update as that of one rank alone.

    step: its name in the text. ranks: compared one by one, and only the first of them is kept.
    """
    rest = iter(ranks)
    every = [next(rest)]
    comparison, seen = ProgramComparison(every[0]), [every[0].rank]
    for one in rest:
        comparison.add(one)
        seen.append(one.rank)
        every += [one] if len(seen) == len(every) + 1 and one.rank == len(every) else []
    terms, axis = Terms(), every[0].states[0].setup.axis
    alone = Interpretation(terms=terms, world=world, one_rank=True)
    named, own = (axis.name, axis.group_name), comparison.own_parts()
    differs = comparison.differs
    if differs is None or len(every) < world:  # one is read for all; else all beside each other
        every = every[:1]
    own = own if differs is None else frozenset()
    together = Interpretation(terms=terms, world=world, one_rank=False, axis=named, own_parts=own)
    budget = Budget() if budget is None else budget
    wanted, found = _side([one_rank], alone, budget.of_one()), _side(every, together, budget)
    wrong, line = dict(_differences(wanted.outputs, found.outputs, varies=world == 1)), ""
    for repeat in (wanted.again, found.again):
        apart = (k for k, x in repeat.items() if not _equal(x, wanted.outputs.get(k)))
        wrong = dict.fromkeys((k for k in apart if k[0].startswith("state")), _NEXT) | wrong
    stopped = found.stopped or wanted.stopped
    if differs is not None and (len(every) < world or stopped is not None or wrong):
        why = next(iter(wrong.values()), "") if stopped is None else stopped[1]
        why += _PIECES if stopped is None else ""
        why = f"{comparison.why}: {why}" if len(every) == world > 1 else comparison.why
        line, wrong = line_of(differs), dict.fromkeys(wrong or found.makers, why)
    elif stopped is not None:
        node, why = stopped
        ends = [node] if found.stopped else []
        line = _where(alone, wanted, found, ends) if "budget" not in why else ""
        wrong = dict.fromkeys(found.makers, f"nothing is known of {node.name}: {why}")
        line = line or line_of(node)
    elif wrong:
        line = _where(alone, wanted, found, [found.makers[k] for k in wrong if k in found.makers])
    claims = [
        Claim(tensor=key[0], leaf=key[1], why=wrong.get(key, ""), line=line if key in wrong else "")
        for key in {**found.makers, **wanted.makers}
        if key[0].startswith("state")
    ]
    return Proof(
        step=step,
        world=world,
        ranks=tuple(seen),
        ops=(wanted.ops, found.ops),
        claims=tuple(claims),
        beside=tuple(_beside(wanted.again, found.again, alone)),
    )


_NEXT = "the next call makes something else of it, by what this one has kept"
_PIECES = (
    ". Ranks have other pieces of leaves: what looks at more than an element of one is another "
    "function on each; ctx.sum and ctx.norm look at all"
)


def _side(programs: Sequence[RecordedStep], reading: Interpretation, budget: Budget) -> _Side:
    """Read one program, or those of all ranks beside each other."""
    given = []
    for program in programs:
        starts = inputs_of(list(program.graph.graph.nodes))
        places = read.places_of(program, program.inputs, starts)
        values = [read.input_value(reading.terms, *x) for x in zip(places, starts, strict=True)]
        if len(programs) > 1:  # what each has; of one that stands for all, as it is
            at = program.rank
            values = [
                Symbolic(x.shape, cut(x.pieces, at * x.numel, x.numel)) if x.spread else x
                for x in values
            ]
        given.append(values)
    reads = read.read_together([one.graph for one in programs], given, reading, budget)
    stopped = next((one.stopped for one in reads if one.stopped), None)
    first, nodes = programs[0], list(programs[0].graph.graph.nodes)
    ends: Any = nodes[-1].args[0]
    has_next = any(node.target is AGAIN for node in nodes)
    paths = [re.sub("^aux", "state", path) if has_next else path for path in first.outputs]
    count = sum(path.startswith("state") for path in first.outputs)
    places, made = read.places_of(first, paths, ends), list[Symbolic]()
    for place, *some in zip(places, *(one.outputs for one in reads if not stopped)):  # noqa: B905
        if len(some) > 1 and place.spread:
            pieces = joined(p for x in some for p in x.pieces)
            made.append(Symbolic(some[0].shape, pieces, spread=True))
        elif some:
            made.append(some[0] if len({*some}) == 1 else some[0]._replace(spread=True))
    return _Side(
        ops=sum(n.op == "call_function" and n.target not in (GRADIENT, AGAIN) for n in nodes),
        inputs=read.places_of(first, first.inputs, inputs_of(nodes)),
        values=reads[0],
        stopped=stopped,
        makers={
            key: node
            for place, node in zip(places[:count], ends, strict=False)
            for key in (place.keys if node.meta["val"].numel() else ())
        },
        outputs=read.outputs_by_leaf(places[: len(made)][:count], made[:count]),
        again=read.outputs_by_leaf(places[: len(made)][count:], made[count:]),
    )


def _differences(
    wanted: read.Values, found: read.Values, *, varies: bool
) -> Iterator[tuple[read.Key, str]]:
    """Yield (key, why) for each tensor of the new state that is not shown."""
    for key in (key for key in {**wanted, **found} if key[0].startswith("state")):
        a, b = wanted.get(key), found.get(key)
        if a is None or b is None:
            yield key, "it is not on the same ranks as before, or not in both programs"
        elif any(x.term.varies for x in a.addends) and not varies:
            yield key, f"on one rank it depends on more of the batch than a gradient: {_brief(a)}"
        elif a.pieces != b.pieces or (any(x.term.varies for x in b.addends) and not varies):
            yield key, "it is made of {} and not of {}".format(*map(_brief, _inner(b, a)))


def _beside(wanted: read.Values, found: read.Values, alone: Interpretation) -> Iterator[str]:
    """Yield what is shown of each tensor that is returned beside the state, such as the loss."""
    for key in (key for key in {**wanted, **found} if not key[0].startswith("state")):
        one = wanted.get(key)
        ways = [("as on one rank", one)]
        for what, over in (("mean", alone.mean), ("sum", alone.over_ranks)):
            of_all = one and one.on(Stretch(p.numel, over(p.sum)) for p in one.pieces)
            ways.append((f"its {what} over ranks", of_all))
        shown = (what for what, value in ways if _equal(value, found.get(key)))
        yield f"{key[0]} ({next(shown, 'not shown')})"


def _equal(a: Symbolic | None, b: Symbolic | None) -> bool:
    return a is not None and b is not None and a.pieces == b.pieces


def _inner(a: Symbolic, b: Symbolic) -> tuple[Symbolic, Symbolic]:
    """Return the innermost operands in which two values differ, while one function makes both."""
    while True:
        pairs = zip(a.pieces, b.pieces, strict=False)
        sums = next(((p.sum, q.sum) for p, q in pairs if p.sum != q.sum), None)
        if sums is None or [len(one) for one in sums] != [1, 1]:
            return a, b
        (x,), (y,) = sums
        inner = zip(x.term.operands, y.term.operands, strict=False)
        other = next(((p, q) for p, q in inner if p != q), None)
        if x.term.head != y.term.head or x[1:] != y[1:] or other is None:
            return a, b
        a, b = other


def _brief(value: Symbolic) -> str:
    text = text_of(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _where(reading: Interpretation, wanted: _Side, found: _Side, ends: Sequence[fx.Node]) -> str:
    """Return the line at which what the ranks do begins to differ."""
    setups = [place.setup for place in found.inputs if place.setup is not None]
    by = {exact(one.reduction.gradient_predivide_factor) for one in setups}
    by |= {Fraction(reading.world), *(reading.world / x for x in by)}
    made = (value for values in wanted.values.made.values() for value in values)
    explained = read.Explained(reading, made, wanted.outputs.items(), by)
    node = read.first_unexplained(found.values, explained, found.inputs, ends)
    return line_of(node or ends[0]) if ends else ""
