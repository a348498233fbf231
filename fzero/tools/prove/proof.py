"""`prove`: a step, a state and its arguments -> a proof about the step on any number of ranks."""

from __future__ import annotations

import ctypes
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
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fzero.context.current_rank import abstract_rank
from fzero.context.modes import in_transform, is_recorded
from fzero.errors import AxisError, FzeroError, LayoutError, PhaseError
from fzero.errors.check import is_count, is_positive, require
from fzero.machine.partition import assemble
from fzero.machine.placeholder import LazyParam
from fzero.optim.recorded import SCHEDULES
from fzero.state import NAMESPACE, Placement, TrainState
from fzero.state.progress import Phase
from fzero.tools.prove.gradient import AGAIN, GRADIENT, again, marked
from fzero.tools.prove.read import (
    BufferPlace,
    Explained,
    Key,
    ProgramRead,
    digest,
    first_unexplained,
    input_value,
    outputs_by_leaf,
    places_of,
    read_together,
)
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
    facts_of,
    joined,
    text_of,
)
from fzero.tools.trace.found import AsFound, bytes_of
from fzero.tools.trace.program import RATE, UPDATE, RecordedStep, record_step, require_recordable
from fzero.transforms.models import flatten_states, map_states
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
        given = optree.tree_map(
            lambda x: x[0] if isinstance(x, Tensor) else x, given, namespace=NAMESPACE
        )
    require("prove: budget_s", budget_s, is_positive, "a number of seconds above 0")
    budget = Budget(budget_s, len(ranks_of(world)))
    if claim := next((x for one in states for x in _out_of_reach(one)), None):
        named = describe_function(inner)
        return Proof(step=named, world=world, ranks=(), ops=(0, 0), claims=(claim,))
    with AsFound("prove", inner, state, given) as found:
        recorder = ProgramRecorder(inner, state, given, budget, found)
        return _Attempt(describe_function(inner), recorder, world, budget).proof()


def _out_of_reach(state: TrainState) -> Iterator[Claim]:
    """Yield what no program of a rank shows, before one is recorded."""
    for name, slot in state.slots.items():
        own = slot.form.placement in (Placement.PARTIAL, Placement.OWNER)
        if slot.form.lifetime == "run" and own:
            why = "each rank has its own (Placement.PARTIAL, OWNER): it is no part of a state of "
            yield Claim(tensor=f"state.slots[{name!r}]", leaf="", why=f"{why}one rank")
    for one in state.setup.policy.points:
        if getattr(one, "whole", False):
            why = f"{one.name} looks at whole leaves (needs=), each on its owner: a rank has the "
            yield Claim(tensor="state", leaf="", why=f"{why}program of its own leaves")


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One proof: the programs are recorded, compared and read, and what is outside is looked at."""

    step: str
    recorder: ProgramRecorder
    world: int
    budget: Budget

    def proof(self) -> Proof:
        try:
            return self._tried()
        except OutOfBudget as error:
            return self._refused(f"{error}")
        except Exception as error:
            if isinstance(error, FzeroError) or not (noted := self.recorder.watch.noted):
                raise
            return self._refused("; ".join(noted))  # of which torch says something else

    def _tried(self) -> Proof:
        record = self.recorder.of
        alone = record(1, 0)
        ranks = (record(self.world, rank) for rank in ranks_of(self.world))
        proof = prove_programs(self.step, alone, ranks, self.world, budget=self.budget)
        if not proof:
            return proof
        # The ranks' programs were compared with each other; that of one rank with that of a later
        # call, in which torch has looked up what it wants to know.
        if (node := same_program(alone, record(1, 0))) is not None:
            return self._refused("a later call has another program", line_of(node))
        noted = self.recorder.watch.noted
        local = tuple(sorted(self.recorder.local))
        return self._refused("; ".join(noted)) if noted else replace(proof, local=local)

    def _refused(self, why: str, line: str = "") -> Proof:
        return Proof(
            step=self.step,
            world=self.world,
            ranks=(),
            ops=(0, 0),
            claims=(Claim(tensor="state", leaf="", why=why, line=line),),
        )


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
    target = (
        node.target
        if hasattr(node.target, "overloadpacket")
        else getattr(node.target, "__name__", node.op)
    )
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
        params: Any = optree.tree_unflatten(
            self._treespec, [_params(mode, one) for one in self._given]
        )
        with self.watch, abstract_rank(rank, world):
            new = self._step.init(
                params, self._optimizers, initializer=lambda _, leaf: torch.empty_like(leaf)
            )
        if known := list(self._schedules.get(world, ())):  # that of the first rank is that of all
            new = map_states("prove", lambda one: one.replace(schedule=known.pop(0)), new)
        states = flatten_states("prove", new)[0]
        step = marked(self._step, len(states), self.local) if world == 1 else self._step
        with self.watch:
            warm = world in self._schedules  # torch looks up much as it first records
            watched = self.watch.around(self._again(step), self._budget.of_one(), warm=warm)
            made = record_step(watched, (new, *self._args), states[0].setup.axis, rank, self._found)
        self.watch.compare_draws()
        if any(new.setup != old.setup for new, old in zip(_after(made), made.states, strict=True)):
            self.watch.note("the new state has other options than the old one")
        self._schedules.setdefault(world, [one.schedule for one in made.states])
        return made

    def _again(self, step: Any) -> Any:
        """Return the step; where a call keeps something for the next one, that one follows."""

        def twice(*args: Any) -> Any:
            given: Any = args
            leaves, treespec = optree.tree_flatten(given, namespace=NAMESPACE)
            one = step(*optree.tree_unflatten(treespec, leaves))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self.watch.call_ends()
                if not self._found.changed():
                    return one
                kept = AsFound("prove", *self._found.roots)
                kept.look()
            self.watch.call_begins()
            again(next(x for x in leaves if isinstance(x, Tensor)))
            other = step(*optree.tree_unflatten(treespec, leaves))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self.watch.call_ends()
                if where := kept.changed():
                    self.watch.note(f"a call writes {where}, which the next call may read")
            return one[0], other[0]

        return twice


def _after(program: RecordedStep) -> list[TrainState]:
    """Return the states that come out, without numbers."""
    leaves: Any = [0] * program.result.num_leaves
    returned: Any = optree.tree_unflatten(program.result, leaves)
    return flatten_states("prove", returned[0])[0]


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
    """Watches this thread while it is entered.

    noted: what was seen, once each. warm: whether what libraries look up once is known to them.
    inside: whether the step runs now, and not what records it.
    """

    def __init__(self) -> None:
        self.noted: dict[str, None] = {}
        self.warm = self.inside = False
        self._rates: dict[int, Any] = {}
        self._random: Tensor = torch.default_generator.get_state()  # before a call
        one = torch.Generator()
        torch.rand(1, generator=one.manual_seed(_SEED))  # no seed leaves a generator here
        self._body = bytes_of(one.get_state())[8:]
        self._seeds: list[int] = []  # of this call: where the generator stood, draw by draw
        self._draws: list[str] = []  # of this call: what was drawn, and when a state was put back
        self._first_draws: list[str] | None = None

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

    def call_begins(self) -> None:
        """The step runs from here on; let the generator stand where no program puts it."""
        self.inside, self._seeds = True, []
        self._moves()

    def call_ends(self) -> None:
        """It does no longer. Put the generator back, and note where it was left."""
        self.inside = False
        self._stands()
        torch.default_generator.set_state(self._random)

    def draws(self, what: str) -> None:
        """A random number is drawn: a record moves no generator, so it is moved here."""
        if self.inside:
            self._stands()
            self._draws.append(what)
            self._moves()

    def _stands(self) -> None:
        """Note whether the generator stands where the last draw has left it."""
        seed = torch.default_generator.initial_seed()
        if seed not in self._seeds or _state_now()[8:] != self._body:
            self.note("it seeds the random numbers of torch")
        elif seed != self._seeds[-1]:
            self._draws.append(f"set to {self._seeds.index(seed)}")

    def _moves(self) -> None:
        self._seeds.append(_SEED + len(self._seeds))
        state = bytearray(self._seeds[-1].to_bytes(8, "little") + self._body)
        torch.default_generator.set_state(torch.frombuffer(state, dtype=torch.uint8))

    def compare_draws(self) -> None:
        """Note a program whose states are put back elsewhere among the draws than another's."""
        first = self._draws if self._first_draws is None else self._first_draws
        self._first_draws = first
        if first != self._draws and any(x.startswith("set") for x in (*first, *self._draws)):
            self.note("it sets the state of random numbers in other places than on one rank")

    def __enter__(self) -> Watch:
        self._thread = threading.get_ident()
        self._watching = _watching(self)
        self._watching.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watching.__exit__(*error)

    def around(self, step: Callable[..., Any], budget: Budget, *, warm: bool) -> Callable[..., Any]:
        """Return the step, watched op by op, within a budget.

        warm: torch has looked up what it needs; who reads the environment now is the step.
        """

        def watched(*args: Any) -> Any:
            self.warm, self._draws = warm, []
            self.call_begins()
            try:
                with _EachOp(self, budget), _EachCall(self):
                    return step(*args)
            finally:
                self.inside = False
                torch.default_generator.set_state(self._random)

        return watched


def _state_now() -> bytes:
    with torch._C.DisableTorchFunction():  # and no op: modes and transforms are at work
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())


_SEED = 2**61 + 0x5EED  # that nobody else sows


@contextmanager
def _watching(watch: Watch) -> Iterator[None]:
    """Put what says what it is asked in the place of what a step may ask."""
    environment, swap = os._Environ, torch.utils.swap_tensors
    reads = {name: getattr(environment, name) for name in ("__getitem__", "__iter__", "__len__")}

    def reader(name: str) -> Any:
        def read(self: Any, *key: Any) -> Any:
            if watch.warm:
                asked = (
                    f"[{os.fsdecode(key[0])!r}]" if key and isinstance(key[0], str | bytes) else ""
                )
                watch.notes(f"it reads os.environ{asked}")
            return reads[name](self, *key)

        return read

    def swapped(*tensors: Any) -> Any:
        watch.notes("it swaps the memory of tensors, which is in no program")
        return swap(*tensors)

    groups = c10d._world
    try:
        for name in reads:
            setattr(environment, name, reader(name))
        torch.utils.swap_tensors, c10d._world = swapped, _Groups(watch, groups)
        yield
    finally:
        for name, read in reads.items():
            setattr(environment, name, read)
        torch.utils.swap_tensors, c10d._world = swap, groups


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


class _EachOp(TorchDispatchMode):
    def __init__(self, watch: Watch, budget: Budget) -> None:
        super().__init__()
        self._watch, self._budget = watch, budget

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, LazyParam) for kind in types):
            return NotImplemented  # a placeholder handles it first; the ops it calls come back
        # An error where torch asks for a device, or inside of autograd, would end the process.
        aten = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
        computes = aten and not func.is_view
        if computes and torch._C._current_autograd_node() is None:
            self._budget.check(f", at {func}")
        if aten and torch.Tag.nondeterministic_seeded in func.tags:
            self._watch.draws(str(func))
        if func is RATE:
            self._watch.asks_for_rate(args[1])
        try:
            return func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
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
    facts = [_facts(node, number, program) for node in number]
    return facts, (program.inputs, program.outputs)


def _facts(node: fx.Node, number: Mapping[fx.Node, int], program: RecordedStep) -> Hashable:
    val = node.meta.get("val")
    made = val if isinstance(val, list | tuple) else [val]
    kinds = tuple((tuple(x.shape), x.dtype) for x in made if isinstance(x, Tensor))
    args = (
        node.args[:2] if node.target is _SELECT else node.args
    )  # which part: see `ProgramComparison`
    held = digest(program.graph, node) if node.op == "get_attr" else None
    target = node.target if node.op == "call_function" else node.op
    return target, _plain(args, number), _plain(node.kwargs, number), kinds, held


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
    """One of the two programs, read."""

    ops: int
    inputs: Sequence[BufferPlace]
    read: ProgramRead
    places: Sequence[BufferPlace]  # of what it returns
    count: int  # of those of this call; the next call's follow, if one keeps something for it
    makers: Mapping[Key, fx.Node]  # what makes the outputs
    values: Sequence[Symbolic]

    @property
    def outputs(self) -> Mapping[Key, Symbolic | None]:
        """What a call makes of the state."""
        return outputs_by_leaf(
            self.places[: len(self.values)][: self.count], self.values[: self.count]
        )

    @property
    def again(self) -> Mapping[Key, Symbolic | None]:
        """What the next call makes of the same state."""
        return outputs_by_leaf(
            self.places[: len(self.values)][self.count :], self.values[self.count :]
        )


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
    (wanted,) = _sides([one_rank], alone, budget.of_one())
    found = _joined(_sides(every, together, budget))
    wrong, line = dict(_differences(wanted.outputs, found.outputs, varies=world == 1)), ""
    for repeat in (wanted.again, found.again):
        apart = (k for k, x in repeat.items() if not _equal(x, wanted.outputs.get(k)))
        wrong = dict.fromkeys((k for k in apart if k[0].startswith("state")), _NEXT) | wrong
    stopped = found.read.stopped or wanted.read.stopped
    if differs is not None and (len(every) < world or stopped is not None or wrong):
        why = next(iter(wrong.values()), "") if stopped is None else stopped[1]
        why += _PIECES if stopped is None else ""
        why = f"{comparison.why}: {why}" if len(every) == world > 1 else comparison.why
        line, wrong = line_of(differs), dict.fromkeys(wrong or found.makers, why)
    elif stopped is not None:
        node, why = stopped
        ends = [node] if found.read.stopped else []
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


def _sides(
    programs: Sequence[RecordedStep], reading: Interpretation, budget: Budget
) -> list[_Side]:
    """Read one program, or those of all ranks beside each other."""
    given, ends, counts, inputs = [], [], [], []
    for program in programs:
        nodes = list(program.graph.graph.nodes)
        ends_in: Any = nodes[-1].args[0]
        starts, outs = [n for n in nodes if n.op == "placeholder"], list(ends_in)
        paths = list(program.outputs)
        if any(node.target is AGAIN for node in nodes):
            paths = [re.sub("^aux", "state", path) for path in paths]
        counts.append(sum(path.startswith("state") for path in program.outputs))
        inputs.append(places_of(program, program.inputs, starts))
        ends.append([*zip(places_of(program, paths, outs), outs, strict=True)])
        values = (
            input_value(reading.terms, *pair) for pair in zip(inputs[-1], starts, strict=True)
        )
        given.append([_of_rank(x, program.rank, len(programs)) for x in values])
    every = read_together([one.graph for one in programs], given, reading, budget)
    return [_side(*each) for each in zip(programs, inputs, every, ends, counts, strict=True)]


def _of_rank(value: Symbolic, rank: int, ranks: int) -> Symbolic:
    """Return what a rank has; of one rank that stands for all, as it is."""
    if ranks == 1 or not value.spread:
        return value
    return Symbolic(value.shape, cut(value.pieces, rank * value.numel, value.numel))


def _side(
    program: RecordedStep,
    inputs: Sequence[BufferPlace],
    made: ProgramRead,
    ends: Sequence[tuple[BufferPlace, fx.Node]],
    count: int,
) -> _Side:
    makers = {
        key: node
        for place, node in ends[:count]
        for key in (place.keys if node.meta["val"].numel() else ())
    }
    nodes = program.graph.graph.nodes
    ops = sum(n.op == "call_function" and n.target not in (GRADIENT, AGAIN) for n in nodes)
    return _Side(ops, inputs, made, [place for place, _ in ends], count, makers, made.outputs)


def _joined(sides: Sequence[_Side]) -> _Side:
    """Return the sides of all ranks as one, with what they have together."""
    first, *_ = sides
    stopped = next((one.read.stopped for one in sides if one.read.stopped), None)
    first = first._replace(read=first.read._replace(stopped=stopped))
    if len(sides) == 1 or stopped is not None:
        return first
    values = []
    for place, *some in zip(first.places, *(one.values for one in sides), strict=True):
        if place.spread:
            pieces = joined(p for x in some for p in x.pieces)
            values.append(Symbolic(some[0].shape, pieces, spread=True))
        else:
            values.append(some[0] if len({*some}) == 1 else some[0]._replace(spread=True))
    return first._replace(values=values)


def _differences(
    wanted: Mapping[Key, Symbolic | None], found: Mapping[Key, Symbolic | None], *, varies: bool
) -> Iterator[tuple[Key, str]]:
    """Yield (key, why) for each tensor of the new state that is not shown."""
    for key in (key for key in {**wanted, **found} if key[0].startswith("state")):
        a, b = wanted.get(key), found.get(key)
        if a is None or b is None:
            yield key, "it is not on the same ranks as before, or not in both programs"
        elif any(x.term.varies for x in a.addends) and not varies:
            yield key, f"on one rank it depends on more of the batch than a gradient: {_brief(a)}"
        elif a.pieces != b.pieces or (any(x.term.varies for x in b.addends) and not varies):
            yield key, "it is made of {} and not of {}".format(*map(_brief, _inner(b, a)))


def _beside(
    wanted: Mapping[Key, Symbolic | None],
    found: Mapping[Key, Symbolic | None],
    alone: Interpretation,
) -> Iterator[str]:
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
    made = (value for values in wanted.read.made.values() for value in values)
    explained = Explained(reading, made, wanted.outputs.items(), by)
    node = first_unexplained(found.read, explained, found.inputs, ends)
    return line_of(node or ends[0]) if ends else ""
