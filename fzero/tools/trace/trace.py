"""`trace`: the program of one rank in a step, counted, printed like a jaxpr, and compared.

`check_spmd`: do all ranks make the same collectives?
"""

from __future__ import annotations

import html
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import chain, groupby
from math import prod
from typing import Any, Literal

import torch
from torch import fx

from fzero.collectives import CollectiveLog, assert_same_everywhere, disagreement, told_everywhere
from fzero.context.modes import in_transform, is_recorded
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.state import Placement
from fzero.tools.trace.calls import CalledOp, Constant, Operand, calls_of
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.ops import Op, Value, ops_of
from fzero.tools.trace.program import (
    FIELD,
    UPDATE,
    RecordedStep,
    inputs_of,
    is_collective,
    record_step,
)
from fzero.tools.trees import map_tensors
from fzero.transforms.models import flatten_states
from fzero.transforms.pipeline import Step, describe_function
from fzero.transforms.simulate import require_stacked


def trace(step: Callable[..., Any], *, rank: int | None = None) -> Callable[..., Trace]:
    """Return t: t(state, *args) is the program that `step(state, *args)` runs on one rank.

    Every ATen op and collective of one optimizer step, forward, backward and update, in the order
    in which they run, at every stage; no number is computed and nothing is sent. At stage 3 a state
    without a schedule is given that of its first step, so that the program is that of a steady one.

    The ranks are those of the state: one process, the processes of a group, or, of a simulated
    step with a stacked state, its virtual ranks. The update of a rule of `fzero.optim` is one op,
    out of place, unless the step differentiates it.

    Args:
        step: (state, *args) -> (state, aux), sharded or not; or `fzero.simulate` of one.
        rank: whose program; default this process's, or virtual rank 0.

    Returns:
        A function of the arguments of `step` that returns a `Trace`. Not a collective.

    Raises:
        LayoutError: for a `rank` that the axis does not have, in the call.
        PhaseError: in the call, if the step reads a value of a tensor (`.item()`, `if x > 0:`),
            and inside of another trace or transform.

    Source: Bradbury et al., JAX, `jax.make_jaxpr`; Reed et al., "torch.fx", arXiv 2112.08429.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.simulate(fzero.shard(step_fn, stage=2), world_size=4)
        >>> state = step.init({"w": torch.ones(16)}, fzero.optim.sgd(1.0))
        >>> program = trace(step)(state, torch.ones(4, 16))
        >>> program.collectives, program.wire_bytes
        ({'reduce_scatter': 1, 'all_gather': 1}, 96)
    """
    if not callable(step):
        raise LayoutError(
            f"trace got a {type(step).__name__} in the place of the step.",
            cause="a step that was called already.",
            fix="pass the function: fzero.trace(step)(state, batch).",
        )

    def traced(*arguments: Any) -> Trace:
        with AsFound("trace", step, arguments) as found:
            program = program_of(step, arguments, rank, found)
            inputs, ops, outputs = ops_of(program)
            world_size = program.states[0].setup.axis.size
            return Trace(
                title=f"{describe_function(step)} on rank {program.rank} of {world_size}",
                rank=program.rank,
                inputs=inputs,
                ops=ops,
                outputs=outputs,
                log=program.log,
                graph=program.graph,
                calls=calls_of(program, ops),
            )

    return traced


def program_of(
    step: Callable[..., Any], arguments: tuple[Any, ...], rank: int | None, found: AsFound
) -> RecordedStep:
    """Record a step on one rank of the axis that its state is on."""
    if in_transform() or is_recorded(()):
        raise PhaseError(
            "trace inside of a torch.func transform or of another trace.",
            cause="a traced step in the place of the step.",
            fix="trace the outermost function.",
        )
    states = flatten_states("trace", arguments[0] if arguments else None)[0]
    axis = states[0].setup.axis
    simulated = isinstance(step, Step) and step.name == "simulate"
    if not simulated and not axis.group_name and axis.size > 1:
        raise AxisError(
            f"trace of a step on one rank, with the stacked state of {axis}.",
            cause="the state was made by `fzero.simulate(...).init`.",
            fix=f"trace the simulated step, fzero.simulate(step, world_size={axis.size}), with "
            "stacked batches.",
        )
    if rank is None:
        rank = 0 if simulated else axis.rank
    if type(rank) is not int or not 0 <= rank < axis.size:
        raise LayoutError(
            f"trace: rank={rank!r}, and {axis} has ranks 0 to {axis.size - 1}.",
            cause="a state of fewer ranks than were meant.",
            fix="trace with a state of more ranks, or give one of these.",
        )
    if isinstance(step, Step) and simulated:
        require_stacked("trace", arguments, axis.size)
        # Copies, so that bytes of one rank are counted and not of the whole stack.
        step = step.inner
        arguments = map_tensors(
            lambda x: torch.empty_like(x[rank], requires_grad=x.requires_grad), arguments
        )
    return record_step(step, arguments, axis, rank, found)


def check_spmd(step: Callable[..., Any], state: Any, args: Any = ()) -> tuple[str, ...]:
    """Return the collectives of a step, in order, if every rank makes the same ones.

    Each rank's program is traced (see `fzero.trace`), and compared before any of its collectives is
    issued; then the calls in it (`psum`, `grad_and_reduce`, `map_params`) with their options, which
    ranks tell each other at run time; then the states that it returns: updated by the same ops, or
    as they were given. Ranks that read other parameters, or read them in
    another order, are found, too; stage 3 serves them, at the price of a slower step.

    Args:
        step: (state, *args) -> (state, aux); or `fzero.simulate` of one, whose ranks are then all
            traced here, one after the other.
        state: as the step is given it.
        args: the further arguments of the step, a tuple; what is no tuple is the only one. A batch
            that is a tuple goes into one: ((x, y),).

    Returns:
        A line for each collective: what it is, the axis, the parameters, the shapes it gives. In
        processes this is a collective itself: every rank calls it.

    Raises:
        MismatchError: on every rank, for programs that differ: the first collective in which they
            do, the ranks, and the parameters that it is about; or the first call or option.
        PhaseError: as `fzero.trace` does.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     return state, fzero.pmean(x) if fzero.axis_index() < 2 else x
        >>> step = fzero.simulate(fzero.shard(step_fn, stage=0), world_size=3)
        >>> state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0))
        >>> check_spmd(step, state, torch.ones(3, 2))
        Traceback (most recent call last):
            ...
        fzero.errors.MismatchError: the ranks disagree about the collectives of the step: rank 0 has
        0: all_reduce dp -> f32[2], rank 2 has nothing.
        Usual cause: ...
    """
    arguments = (state, *(args if isinstance(args, tuple) else (args,)))
    axis = flatten_states("check_spmd", state)[0][0].setup.axis
    what = ("the collectives of the step", "the calls of the step", "what the step returns")
    with AsFound("check_spmd", step, arguments) as found:
        if isinstance(step, Step) and step.name == "simulate":
            everyone = [_schedule(step, arguments, rank, found) for rank in range(axis.size)]
            for of, lines in zip(what, zip(*everyone, strict=True), strict=True):
                if any(other != lines[0] for other in lines):
                    raise disagreement(lines, what=of)
            return everyone[0][0]
        with told_everywhere(axis, what=what[0]):
            mine = _schedule(step, arguments, None, found)
        for of, lines in zip(what, mine, strict=True):
            assert_same_everywhere(lines, axis, what=of)
        return mine[0]


def _schedule(
    step: Callable[..., Any], arguments: tuple[Any, ...], rank: int | None, found: AsFound
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return what one rank does, a line each: collectives, calls and their options, results."""
    program = program_of(step, arguments, rank, found)
    made = [op for op in ops_of(program)[1] if op.is_collective]
    collectives = (f"{op.name} {op.detail} -> {' '.join(map(str, op.gives))}" for op in made)
    calls = list[str]()
    for number, text in enumerate(program.log.calls):
        name, *options = text.splitlines()
        calls += [f"{number}: {name}", *(f"{number}: {name}, {option}" for option in options)]
    numbered = tuple(f"{number}: {text}" for number, text in enumerate(collectives))
    return numbered, tuple(calls), tuple(_returned(program))


def _returned(program: RecordedStep) -> Iterator[str]:
    """Yield a line for each tensor of the returned states that an update changes.

    It says whether the tensor is an argument. Of what every rank has whole, it has the ops behind
    it, as far as the last collective or update: before those ranks may compute other things.
    """
    nodes = list(program.graph.graph.nodes)
    paths = dict(zip(inputs_of(nodes), program.inputs, strict=True))
    for node, path in zip(nodes[-1].args[0], program.outputs, strict=True):
        if (found := FIELD.match(path)) is None or found[2] not in ("params", "optimizer", "step"):
            continue
        is_whole = path.endswith((".step", ".count")) or (
            found[2] == "params" and program.setups[found[1]].params is Placement.REPLICATED
        )
        behind, ahead = dict[fx.Node, str](), [node] if is_whole else []
        while ahead:
            if (one := ahead.pop()) not in behind:
                target: Any = one.target
                behind[one] = getattr(target, "__name__", str(target))
                is_last = one in paths or target is UPDATE or is_collective(one)
                ahead += [] if is_last else one.all_input_nodes
        of = f"the argument {paths[node]}" if node in paths else f"new {sorted(behind.values())}"
        yield f"{path}: {of}"


# What a trace is.


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The program of one rank in one step.

    `graph` is the same as a torch.fx.GraphModule, from the tensors of the arguments to those of the
    result. `title` says of which step, on which rank.
    """

    title: str
    rank: int
    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]  # with the name of the value that comes out, and its path
    log: CollectiveLog = field(repr=False)
    graph: fx.GraphModule = field(repr=False, compare=False)
    calls: tuple[CalledOp, ...] = ()  # of each op with its arguments; then of each output

    @property
    def collectives(self) -> dict[str, int]:
        """How many buffers go through each kind of collective."""
        return {op: n for op, n in self.log.counts(self.rank).items() if op != "agree"}

    @property
    def exchanges(self) -> int:
        """How many rounds there are, in which ranks announce what comes next, in a few bytes."""
        return self.log.counts(self.rank).get("agree", 0)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in collectives, on the ring bound; without exchanges."""
        return sum(op.wire_bytes for op in self.ops)

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention."""
        return sum(op.flops for op in self.ops)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes alive while each op runs, if every tensor is freed after its last use."""
        return tuple(op.live_bytes for op in self.ops)

    @property
    def peak_bytes(self) -> int:
        """The most of `live_bytes`: the arguments are among them, for the step is pure."""
        return max(self.live_bytes, default=0)

    def diff(self, other: Trace, *, only: Literal["collectives"] | None = None) -> TraceDiff:
        """Return the ops in which `other` differs: with constants, views and what they read.

        Numbers, tensors that are no arguments of the step (by their values), learning rates that
        are functions (by their code), the options of the optimizer, and which elements of which
        value an op reads, are parts of a program; so is what it returns. Names of values and of
        modules do not count, nor does by which views elements were reached.

        Args:
            other: the trace of another rank, stage or version of the step.
            only: "collectives" compares those alone, in their order: the kind, the axis, the
                parameters that they are about, what they give, and their constants.

        Raises:
            LayoutError: for an `other` that is no trace, and another word for `only`.

        Example:
            >>> import torch, fzero
            >>> from fzero.trace import trace
            >>> def step_fn(state, x):
            ...     return state, x.relu()
            >>> state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=0)
            >>> two, three = (trace(step_fn)(state, torch.ones(n)) for n in (2, 3))
            >>> two.diff(two).equal, two.diff(three).equal
            (True, False)
            >>> two.diff(three, only="collectives")  # neither has one
            the same
        """
        if not isinstance(other, Trace) or only not in (None, "collectives"):
            raise LayoutError(
                f"trace.diff was given a {type(other).__name__}, only={only!r}.",
                cause="the step, or its result, in the place of its trace; or another word.",
                fix='trace.diff(other), or trace.diff(other, only="collectives"), with another '
                "trace of fzero.trace(step)(state, *args).",
            )
        return _difference(_lines(self, only), _lines(other, only), (self.title, other.title))

    def __str__(self) -> str:
        return _text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = []
        for line in map(html.escape, str(self).splitlines()):
            marked = f"<mark>{line}</mark>" if line.startswith("  * ") else line
            lines.append(f"<b>{line}</b>" if line and not line.startswith(" ") else marked)
        return "<pre style='line-height:1.3'>" + "\n".join(lines) + "</pre>"


# The difference.


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """The ops in which two programs differ. Empty, and false, if they do the same.

    Each line is an op with what it reads and the shapes that it gives, as in a unified diff: "- "
    for the first program alone, "+ " for the second one alone.
    """

    lines: tuple[str, ...]
    first: tuple[Op | None, Op | None]  # that differ; None: the program ends there

    @property
    def equal(self) -> bool:
        """Whether both do the same."""
        return not self.lines

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __str__(self) -> str:
        return "\n".join(map(_fitted, self.lines)) or "the same"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """An op that is no view, or an output.

    key: what two ops have alike that may be the same: all but which op has made what they read.
    read: those ops, as numbers of lines; None for what no op of the program has made.
    """

    key: tuple[Any, ...]
    read: tuple[int | None, ...]
    text: str
    full: str  # with the names of values, for lines that differ in nothing else
    op: Op | None


def _lines(trace: Trace, only: Literal["collectives"] | None) -> list[_Line]:
    """Return the lines of a program; of its collectives alone, without what made their inputs."""
    calls: Sequence[CalledOp] = trace.calls or [CalledOp(op=op.name) for op in trace.ops]
    ends = [] if only else [None] * (len(calls) - len(trace.ops))
    made: dict[str, tuple[int, int]] = {}  # the line of each value, and which result it is
    names: dict[str, str] = {}
    lines: list[_Line] = []
    for op, call in zip((*trace.ops, *ends), calls, strict=not only):
        if op is not None and (op.kind == "view" or (only and not op.is_collective)):
            continue
        arguments = [x for x in call.arguments if isinstance(x, Constant) or not only]
        reads = [x for x in arguments if isinstance(x, Operand)]
        of = [made.get(x.origin[1]) if x.origin[0] == "value" else None for x in reads]
        inputs = tuple(
            (names.get(x.origin[1]) if at else x.origin, at[1] if at else None, *x[2:])
            for x, at in zip(reads, of, strict=True)
        )
        keys = [(i, x.key) for i, x in enumerate(arguments) if isinstance(x, Constant)]
        gives = " ".join(map(str, op.gives)) if op else ""
        detail = op.detail if op and op.is_collective else ""
        text, full = (_line_text(op, call, names, gives, full=full) for full in (False, True))
        key, read = (call.op, tuple(keys), inputs, gives, detail), (at and at[0] for at in of)
        lines.append(_Line(key=key, read=tuple(read), text=text, full=full, op=op))
        for i, value in enumerate(op.gives if op else ()):
            made[value.name] = len(lines) - 1, i
            names[value.name] = op.name if op else ""
    return lines


def _line_text(
    op: Op | None, call: CalledOp, names: Mapping[str, str], gives: str, *, full: bool
) -> str:
    if op is not None and op.is_collective:
        return f"* {op.name} -> {gives}   <{op.detail if full else _about(op)}>"

    def word(x: Operand | Constant) -> str:
        """Return what an op reads, as people can tell: by the op that made it, or by its path."""
        if isinstance(x, Constant):
            return x.key if full else x.text
        kind, name = x.origin
        made_by = {"value": names.get(name, name), "constant": f"<{name}>"}.get(kind, name)
        if full:
            return f"{x.name}:{made_by}{_view(x)}"
        # One that has its elements as they are in memory, from the first, has no view.
        dense = [prod(x.shape[i + 1 :]) if n != 1 else 0 for i, n in enumerate(x.shape)]
        plain = x.start == 0 and not x.flips and (0 in x.shape or list(x.strides) == dense)
        return f"{made_by}{'' if plain else _view(x)}"

    words = list(map(word, call.arguments))
    values = [w for w, x in zip(words, call.arguments, strict=True) if isinstance(x, Operand)]
    if not full and len(values) > _MOST:
        words = [_few(values), *(x.text for x in call.arguments if isinstance(x, Constant))]
    name = call.op if op is None or full else op.name
    result = f" -> {gives}" if op else ""
    return f"  {' '.join(filter(None, (name, *words)))}{result}"


def _view(x: Operand) -> str:
    """Return which elements of its origin a value has: as the arguments of torch.as_strided."""
    shape, strides = (",".join(map(str, some)) for some in (x.shape, x.strides))
    start = f", byte {x.start}" if x.start else ""
    return f"[{shape}; strides {strides}{start}{' ' * bool(x.flips)}{x.flips}]"


def _difference(a: list[_Line], b: list[_Line], titles: tuple[str, str]) -> TraceDiff:
    """Compare ops with their constants, what each reads, through which views, and what comes out.

    Lines are first brought together by what they are alone. Two that are together are the same op
    if what they read was made by ops that are together.
    """
    alike = [line.key for line in a] == [line.key for line in b]
    blocks = [(0, 0, len(a))] if alike else _matcher(a, b).get_matching_blocks()
    together = {i + k: j + k for i, j, size in blocks for k in range(size)}
    partners = set(together.values())
    apart = [  # stand together and read what does not, though each has a partner
        (i, j)
        for i, j in together.items()
        if any(
            x is not None and x in together and y in partners and together[x] != y
            for x, y in zip(a[i].read, b[j].read, strict=True)
        )
    ]
    if alike and not apart:
        return TraceDiff((), (None, None))
    for i, j in apart:
        a[i] = replace(a[i], key=("first", i), text=a[i].full)
        b[j] = replace(b[j], key=("second", j), text=b[j].full)
    keys = defaultdict[str, set[Any]](set)
    for line in chain(a, b):
        keys[line.text].add(line.key)
    a, b = (  # what looks the same and is not has all of its names
        [replace(line, text=line.full) if len(keys[line.text]) > 1 else line for line in some]
        for some in (a, b)
    )
    found = [f"--- {titles[0]}", f"+++ {titles[1]}"]
    matcher = _matcher(a, b)
    for some in matcher.get_grouped_opcodes(1):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = some[0], some[-1]
        found.append(f"@@ -{i1 + 1},{i2 - i1} +{j1 + 1},{j2 - j1} @@")
        for tag, i, end, j, stop in some:
            found += [f"{' ' if tag == 'equal' else '-'}{line.text}" for line in a[i:end]]
            found += [f"+{line.text}" for line in b[j:stop] if tag != "equal"]
    i, j = next((i, j) for tag, i, _, j, _ in matcher.get_opcodes() if tag != "equal")
    first = a[i].op if i < len(a) else None, b[j].op if j < len(b) else None
    return TraceDiff(tuple(found), first)


def _matcher(a: Sequence[_Line], b: Sequence[_Line]) -> SequenceMatcher[tuple[Any, ...]]:
    keys = [line.key for line in a], [line.key for line in b]
    return SequenceMatcher(None, *keys, autojunk=False)


# The text.

_PHASES = ("forward", "backward", "update")
_COLUMN = 68  # of the module names
_WIDTH = 100
_MOST = 6  # values of a line; of more it has the first and the last ones
_FILLS = {
    f"{prefix}{name}{suffix}": name
    for name in ("ones", "zeros")
    for prefix, suffix in (("", ""), ("new_", ""), ("", "_like"))
}


def _text(trace: Trace) -> str:
    """Return a line for each op and collective, with its module behind "#".

    Parameters are shown by their paths, whatever buffer they are in, and other views as parts of a
    value, "x[1]"; numbers stand among the values, as the op has them. Omitted are views, constants
    filled with one number, empty buffers, and inputs that the step returns unchanged. What is
    longer than 100 columns goes on in the next line.
    """
    ops = trace.ops
    names, constants, hidden = _names(trace)
    lines = [trace.title, "inputs", *_listed([value for value in trace.inputs if value.nbytes])]
    lines += ["constants", *constants] if constants else []
    calls = trace.calls or [None] * len(ops)
    for phase in _PHASES:
        some = [
            _op_line(op, call, names)
            for op, call in zip(ops, calls, strict=False)
            if op.phase == phase and op.kind != "view" and id(op) not in hidden
        ]
        lines += [phase, *some] if some else []
    same = {(value.name, value.path) for value in trace.inputs}
    changed = [value for value in trace.outputs if (value.name, value.path) not in same]
    lines += ["outputs"]
    for path, group in groupby(changed, key=lambda value: value.path.rsplit("[", 1)[0]):
        lines.append(f"    {path} = {_few([names.get(one.name, one.name) for one in group])}")
    lines.append(
        f"{sum(op.kind != 'view' for op in ops)} ops, {trace.flops:,} FLOPs; "
        f"{sum(op.is_collective for op in ops)} collectives, {trace.wire_bytes:,} bytes sent; "
        f"{trace.peak_bytes:,} bytes alive at most"
    )
    return "\n".join(map(_fitted, lines))


def _names(trace: Trace) -> tuple[dict[str, str], list[str], set[int]]:
    """Return the texts of values that no line computes, constants as lines, ids without a line.

    A constant that several values are of has one name. The ids are those of ops.
    """
    base: dict[str, str] = {}  # of a view: the viewed value
    for op in (op for op in trace.ops if op.kind == "view" and op.reads):
        first = base.get(op.reads[0], op.reads[0])
        base.update((value.name, first) for value in op.gives)
    shown = {value.name: value.parameter for value in trace.inputs if value.parameter}
    of_digest: dict[str, str] = {}
    for x in (x for call in trace.calls for x in call.arguments if isinstance(x, Operand)):
        if x.origin[0] == "constant":
            name = base.get(x.name, x.name)
            shown[name] = of_digest.setdefault(x.origin[1], name)
    constants = [f"    {name}:{key.replace(' ', ' = ')}" for key, name in of_digest.items()]
    written = {name for op in trace.ops if op.name.endswith("_") for name in op.reads[:1]}
    hidden: set[int] = set()
    for op in trace.ops:
        fills = _FILLS.get(op.name)
        if fills and len(op.gives) == 1 and op.gives[0].name not in written:
            shown[op.gives[0].name] = fills
            hidden.add(id(op))
        for i, value in enumerate(op.gives):
            if value.parameter:
                shown[value.name] = value.parameter
            elif op.kind == "view" and op.reads:
                part = f"[{i}]" if len(op.gives) > 1 else op.detail
                shown[value.name] = shown.get(op.reads[0], op.reads[0]) + part
    return shown, constants, hidden


def _listed(inputs: Sequence[Value]) -> list[str]:
    """Return a line for each input, and one for all buffers of a kind except parameters."""
    lines = []
    for path, group in groupby(inputs, key=lambda value: value.path.rsplit("[", 1)[0]):
        some = list(group)
        about = [value.holds or (value.parameter,) for value in some]
        if len(some) == 1 or any(map(any, about)):
            for value, paths in zip(some, about, strict=True):
                names = f"   <{_some_paths(paths)}>" if any(paths) else ""
                lines.append(f"    {value.name}:{value} = {value.path}{names}")
        else:
            lines.append(f"    {_few([f'{value.name}:{value}' for value in some])} = {path}")
    return lines


def _op_line(op: Op, call: CalledOp | None, names: Mapping[str, str]) -> str:
    gives = _few([f"{value.name}:{value}" for value in op.gives])
    if op.is_collective:
        reads = _few(list(dict.fromkeys(names.get(name, name) for name in op.reads)))
        return f"  * {gives} = {op.name} {reads}   <{_about(op)}> {op.wire_bytes:,} bytes sent"
    arguments = call.arguments if call else ()
    texts = [x.text for x in arguments if isinstance(x, Constant) and x.text]
    values = [x.name for x in arguments if isinstance(x, Operand)] or op.reads
    if len(values) > _MOST or call is None:
        words = [_few([names.get(name, name) for name in values]), *texts]
    else:  # values and numbers in order, keywords last
        shown = (
            x.text if isinstance(x, Constant) else names.get(x.name, x.name) for x in arguments
        )
        words = sorted(filter(None, shown), key=lambda word: word in texts and "=" in word)
    line = f"    {gives} = {' '.join([op.name, *words])}"
    return f"{line:<{_COLUMN}}  # {op.detail}" if op.detail else line


def _about(op: Op) -> str:
    """Return the axis of a collective, and its parameters; of many, the first two."""
    axis, colon, paths = op.detail.partition(": ")
    return f"{axis}{colon}{_some_paths(paths.split(', '))}"


def _few(words: Sequence[str]) -> str:
    """Return some words; of many, the first and the last ones and how many there are."""
    if len(words) <= _MOST:
        return " ".join(words)
    return " ".join([*words[: _MOST // 2], "...", words[-1], f"({len(words)} values)"])


def _some_paths(paths: Sequence[str]) -> str:
    """Return the paths of parameters; of many, the first two and how many more there are."""
    rest = f" +{len(paths) - 2}" if len(paths) > 4 else ""
    return ", ".join(paths[: 2 if rest else 4]) + rest


def _fitted(line: str) -> str:
    """Return a line, of 100 columns at most: what is behind them goes on in the next one."""
    if len(line) <= _WIDTH:
        return line
    mark = line[0] if line[0] in "+- " else ""  # of a difference; of a trace a space
    rest = line.removeprefix(mark)
    begin = rest[: len(rest) - len(rest.lstrip())]
    return textwrap.fill(
        " ".join(rest.split()),
        _WIDTH,
        initial_indent=mark + begin,
        subsequent_indent=mark + " " * (12 - len(mark)),
        break_on_hyphens=False,
    )
