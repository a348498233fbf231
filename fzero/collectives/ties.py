"""Calls of collectives that connect the losses of ranks: their adjoints run on all, or on none.

The adjoint of a call is a collective, too. Autograd comes to it on a rank whose loss uses what the
call gave; on another rank it would come to none, or to that of another call. So all calls are
numbered, equally on all ranks, and each that any rank differentiates gives a token beside its
result: a tensor without elements, with the same node. `tied` makes of a root of a backward one that
also reaches the tokens of all calls that the backward of any rank reaches. Autograd runs the nodes
that it reaches in the reverse order of their making: so every rank runs the adjoints of the same
calls, the latest first, with no gradient where its loss does not use them, and what comes back
flows on in its own graph.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

from fzero.collectives.performer import UserCall, agreed, before_collective
from fzero.collectives.recompute import UsersCall, runs
from fzero.context import modes
from fzero.context.current_rank import current_ranks
from fzero.errors import LayoutError, MismatchError
from fzero.ranks.mesh import Axis

_TORCH: Any = torch
_AUTOGRAD: Any = _TORCH._C  # what is asked of a graph task has no types
_VARIABLE: Any = Variable  # whose engine is private

Tokens = dict[UsersCall, Tensor]
WORD, WORDS = 60, 2
"""How many calls are told in one number, and how many such numbers in one round."""


@dataclass(eq=False)
class Scope:
    """Where calls are made that one backward may differentiate.

    Attributes:
        level: of torch.func, at which they are differentiated; 0 is autograd's own.
        anchor: a tensor without elements by which it differentiates: that of a rank with no graph.
        in_loss: of a loss that fzero runs: every backward in it is one of the user's.
        tokens: of each call that any rank differentiates at this level, in their order.
    """

    level: int = 0
    anchor: Tensor | None = None
    in_loss: bool = False
    tokens: Tokens = field(default_factory=dict[UsersCall, Tensor])
    _task: int = field(default_factory=_AUTOGRAD._current_graph_task_id)

    def set_in_loss(self, in_loss: bool) -> None:
        """Say whether what runs now is the forward of an engine: of a loss on all ranks."""
        self.in_loss = in_loss

    def add(self, call: UsersCall, token: Tensor, *, backward: bool) -> None:
        """Take the token of a call, unless a checkpoint has made it anew in a backward."""
        anew = not backward and _AUTOGRAD._current_graph_task_id() != self._task
        token = modes.at_level(token, self.level)
        if not anew and token.requires_grad:
            self.tokens[call] = token
            _take_part_in_derivatives()


@dataclass(eq=False)
class _Book:
    """What a rank knows of its calls: how many there were on each set of ranks, and the scopes.

    own: by level of a torch.func.grad (or vjp) of the user's, the nodes of the calls that it
    follows, and a tensor that shows whether it is still that one: the numbers of levels come again.
    """

    counts: Counter[Axis] = field(default_factory=Counter[Axis])
    scopes: weakref.WeakSet[Scope] = field(  # one of an engine goes with it
        default_factory=weakref.WeakSet[Scope]
    )
    own: dict[int, tuple[Tensor, dict[UsersCall, weakref.ref[Any]]]] = field(
        default_factory=dict[int, tuple[Tensor, dict[UsersCall, weakref.ref[Any]]]]
    )

    def calls_of(self, level: int) -> dict[UsersCall, weakref.ref[Any]]:
        """Return the calls that a torch.func.grad of the user's follows, which is going on."""
        if level not in self.own or not modes.is_alive(self.own[level][0]):
            self.own[level] = modes.made_at(level), {}
        return self.own[level][1]


_BOOK = _Book()


def _book() -> _Book:
    here = current_ranks()
    return _BOOK if here is None else here.kept.setdefault(_book, _Book())


def numbered(axis: Axis) -> UsersCall:
    """Return the next call on these ranks: they have all come to it, and count alike."""
    whole, book = (axis.whole or axis).plain, _book()
    book.counts[whole] += 1
    return UsersCall(whole, book.counts[whole])


def anchors() -> dict[int, Tensor]:
    """Return by level a tensor without elements that the backward there differentiates by."""
    return {one.level: one.anchor for one in _book().scopes if one.anchor is not None}


def connected(call: UsersCall, token: Tensor, *, backward: bool) -> None:
    """Tell the scopes of a call that some rank differentiates. backward: of an earlier call.

    One in a part of a loss that has a graph of its own is known outside by a token of that part.
    """
    for run in reversed(runs()):
        if run.tokens is not None:
            run.tokens[call] = token
            return
    book = _book()
    for scope in book.scopes:
        scope.add(call, token, backward=backward)
    for level in {*modes.levels_of_backwards()} - {scope.level for scope in book.scopes}:
        if (own := modes.at_level(token, level)).requires_grad:
            book.calls_of(level)[call] = weakref.ref(own.grad_fn)
            _take_part_in_derivatives()


def differentiated(call: UsersCall) -> None:
    """The adjoint of a call runs in the backward that ends its graph: no other may reach it."""
    if not _AUTOGRAD._autograd._get_current_graph_task_keep_graph():
        for scope in _book().scopes:
            scope.tokens.pop(call, None)


def open_scope(scope: Scope) -> None:
    """Let a scope take tokens from now on."""
    _book().scopes.add(scope)


def close_scope(scope: Scope) -> None:
    """Forget what a scope has taken, and let it take no more."""
    scope.tokens.clear()
    _book().scopes.discard(scope)


@contextmanager
def connecting(level: int = 0, anchor: Tensor | None = None) -> Generator[Scope]:
    """Take the tokens of calls in this block; what it has taken stays in the scope."""
    scope, scopes = Scope(level, anchor, in_loss=True), _book().scopes
    scopes.add(scope)
    try:
        yield scope
    finally:
        scopes.discard(scope)


# The root of a backward.


class _Tie(torch.autograd.Function):
    """y = x, followed at the levels of some tokens, too; their backward gets no gradient."""

    @staticmethod
    def forward(x: Tensor, *tokens: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count = len(inputs) - 1
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        return dys[0], *[None] * ctx.count

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x) if tangents[0] is None else tangents[0].clone()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Tensor) -> tuple[Tensor, Any]:
        x, *tokens = args
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        return with_tokens(x, tokens), 0


def with_tokens(x: Tensor, tokens: Sequence[Tensor]) -> Tensor:
    """Return x, followed at the levels of these tokens, too."""
    apply: Any = cast(Any, _Tie).apply
    return apply(x, *tokens)


def tied_to(root: Tensor, tokens: Sequence[Tensor]) -> Tensor:
    """Return a root of which a backward reaches all of these tokens, too."""
    with torch.enable_grad():
        return with_tokens(root, tokens)


class _Stop(Exception):
    """Ends a graph task in which nothing has run."""


def _reached(
    roots: Sequence[Tensor],
    nodes: Mapping[UsersCall, Any],
    inputs: Sequence[Any] = (),
    *,
    accumulate: bool = True,
) -> set[UsersCall]:
    """Return the calls that a backward from these roots comes to; by `inputs` alone, if given."""
    found = list[bool]()
    probe = tied_to(torch.zeros(()), roots)
    if probe.grad_fn is None:
        return set()

    def ask(_: Any) -> None:  # at the beginning of a graph task it is known what it will run
        found.extend(map(_AUTOGRAD._will_engine_execute_node, nodes.values()))
        raise _Stop

    probe.grad_fn.register_prehook(ask)
    with suppress(_Stop):
        given = (probe,), (torch.zeros_like(probe),), False, False, tuple(inputs), True, accumulate
        _TORCHS_ENGINE.run_backward(*given)
    if not found:  # nothing behind these roots is one of the inputs
        return set()
    reached = {call for call, is_on in zip(nodes, found, strict=True) if is_on}
    # Where what a call gave is an input itself, its node is asked for the gradient, but not run.
    taken = (
        [] if accumulate else [x.node if isinstance(x, GradientEdge) else x.grad_fn for x in inputs]
    )
    for call in [call for call in reached if any(nodes[call] is node for node in taken)]:
        rest = [x for x, node in zip(inputs, taken, strict=True) if node is not nodes[call]]
        if not (rest and _reached(roots, {call: nodes[call]}, rest, accumulate=False)):
            reached.remove(call)
    return reached


class Shared(NamedTuple):
    """What makes the backward of this rank come to the calls that that of any rank comes to.

    Attributes:
        ties: tokens that its root is to be tied to.
        edges: what it is to be taken by beside its inputs.
        connects: whether any rank comes to a call.
    """

    ties: list[Tensor]
    edges: list[GradientEdge]
    connects: bool


def shared(
    roots: Sequence[Tensor],
    tokens: Tokens,
    inputs: Sequence[Any] = (),
    *,
    accumulate: bool = True,
    inside: bool = False,
) -> Shared:
    """Agree with all ranks on the calls that a backward from these roots is to come to.

    It comes to a call that the root of any rank uses, and behind which any rank has one of the
    inputs; both also by way of other calls. A collective of all ranks that have made the calls.
    accumulate: as of the backward. inside: of a loss that is not over.
    """
    ways = ("used", "leads") if inputs else ("used",)
    mine: set[tuple[UsersCall, str]] | None = None
    everyone, unlike = set[tuple[UsersCall, str]](), bool(tokens)
    nodes = {call: token.grad_fn for call, token in tokens.items()}
    while unlike:
        known = [[tokens[call] for call in tokens if (call, way) in everyone] for way in ways]
        used = _reached([*roots, *known[0]], nodes)
        found: set[tuple[UsersCall, str]] = {(call, "used") for call in used}
        if inputs:
            by = [*inputs, *map(_edge_behind, known[1])]
            leads = _reached([*tokens.values()], nodes, by, accumulate=accumulate)
            found |= {(call, "leads") for call in leads}
        mine = found if mine is None else mine
        everyone, unlike = _of_all_ranks(tokens, ways, found, inside=inside)
    mine = mine or set()
    to = [call for call in tokens if all((call, way) in everyone for way in ways)]
    return Shared(
        ties=[tokens[call] for call in to if (call, "used") not in mine],
        edges=[_edge_behind(tokens[call]) for call in to if inputs and (call, "leads") not in mine],
        connects=bool(to),
    )


def _edge_behind(token: Tensor) -> GradientEdge:
    """Return where the gradient goes that the adjoint of a call gives."""
    node: Any = token.grad_fn
    return GradientEdge(*next(edge for edge in node.next_functions if edge[0] is not None))


def _of_all_ranks(
    known: Collection[UsersCall],
    ways: Sequence[str],
    found: Collection[tuple[UsersCall, str]],
    *,
    inside: bool,
) -> tuple[set[tuple[UsersCall, str]], bool]:
    """Return what of the calls any rank has found, and whether some rank has not."""
    everyone, unlike, full = set[tuple[UsersCall, str]](), False, 2**WORD - 1
    # In one order on all ranks: axes of one size in that of their calls, and not of a hash.
    for axis in sorted(dict.fromkeys(call.axis for call in known), key=lambda axis: axis.size):
        calls = [call for call in known if call.axis == axis]
        pairs = [*product(calls, ways)]
        for start in range(0, len(pairs), WORD * WORDS):
            some = pairs[start : start + WORD * WORDS]
            words = [some[i : i + WORD] for i in range(0, len(some), WORD)]
            bits = [sum(1 << i for i, one in enumerate(word) if one in found) for word in words]
            said = *bits, *(full ^ x for x in bits)
            if inside:
                name = f"torch.autograd.grad in a loss that has called {_shown(calls)}"
                call = UserCall(name, "", _AUTOGRAD._current_graph_task_id() >= 0, said)
                heard = before_collective(axis, call)
            else:
                heard = agreed(
                    f"the backward of a loss that has called {_shown(calls)}", said, axis
                )
            count = len(words)
            for word, any_on, any_off in zip(words, heard[:count], heard[count:], strict=True):
                everyone.update(one for i, one in enumerate(word) if any_on >> i & 1)
                unlike = unlike or bool(any_on & any_off)
    return everyone, unlike


def come_to(scope: Scope) -> str:
    """Return which calls of a scope the backward in which this is asked comes to, as a text.

    Ranks that come to others follow no common plan: one would wait where another never comes.
    """
    on = _AUTOGRAD._will_engine_execute_node
    reached = [call for call, token in scope.tokens.items() if on(token.grad_fn)]
    return f"its backward comes to {_shown(reached)}" if reached else ""


def _shown(calls: Sequence[UsersCall]) -> str:
    numbers = [call.number for call in calls]
    same = blake2b(repr(numbers).encode(), digest_size=3).hexdigest()
    return f"{len(calls)} collectives, numbers {numbers[0]} to {numbers[-1]} ({same})"


# A derivative of the user's inside of a loss.


class _Engine(_AUTOGRAD._ImperativeEngine):
    """torch's engine, by which a derivative in a loss comes to the same calls on all ranks.

    torch has no other place where a backward is seen that comes to no adjoint on this rank, and to
    one on another. It is torch's engine from the first call on that a backward may differentiate.
    """

    def run_backward(
        self,
        tensors: Sequence[Any],
        grad_tensors: Sequence[Any],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        """Run it, with the adjoints of all calls that it comes to on any rank."""
        roots, options = list(zip(tensors, grad_tensors, strict=True)), (keep_graph, create_graph)
        tokens = _tokens_of_derivative(accumulate=accumulate_grad)
        given, torchs = accumulate_grad, super()
        if tokens and not all(isinstance(x, Tensor) for x in tensors):
            raise of_an_edge("torch.autograd.grad")
        if not tokens:
            _require_alike(tensors, inputs)
        same = shared(tensors, tokens, inputs, accumulate=given, inside=True)
        if not (same.ties or same.edges):
            by = tuple(inputs), allow_unreachable, accumulate_grad
            return torchs.run_backward(tuple(tensors), tuple(grad_tensors), *options, *by)
        if same.ties:  # of a root of its own; one of the user's may be a constant
            roots = [pair for pair in roots if pair[0].requires_grad]
            tie = tied_to(torch.zeros(0), same.ties)
            roots.append((tie, torch.zeros_like(tie)))
        of, dys = zip(*roots, strict=True)
        by = (*inputs, *same.edges), True, accumulate_grad
        found = torchs.run_backward(of, dys, *options, *by)
        if accumulate_grad:
            return found
        found = found[: len(inputs)]
        if not allow_unreachable and any(x is None for x in found):
            raise RuntimeError(_UNUSED)
        return found


_TORCHS_ENGINE = _VARIABLE._execution_engine
_UNUSED = (  # in torch's words
    "One of the differentiated Tensors appears to not have been used in the graph. Set "
    "allow_unused=True if this is the desired behavior."
)


def _take_part_in_derivatives() -> None:
    if not isinstance(_VARIABLE._execution_engine, _Engine):
        _VARIABLE._execution_engine = _Engine()


def _tokens_of_derivative(*, accumulate: bool) -> Tokens:
    """Return the tokens of the calls that a derivative may come to which begins here.

    Of none if it is one that fzero or torch make within a backward; or of torch.func, which a call
    hears of itself; or in no loss that fzero runs: who calls there is not known on all ranks.
    accumulate: of a backward.
    """
    book, in_backward = _book(), _AUTOGRAD._current_graph_task_id() >= 0
    if not book.scopes or (in_backward and accumulate):
        return {}
    for run in reversed(runs()):
        if run.tokens:
            return run.tokens
    if in_backward:
        return {}
    level = maybe_current_level() or 0
    scopes = [one for one in book.scopes if one.level == level and one.in_loss]
    known = {call: token for one in scopes for call, token in one.tokens.items()}
    return {call: known[call] for call in sorted(known, key=lambda call: call.number)}


def _require_alike(roots: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raise `MismatchError` on all ranks if a derivative at a level of the user's own differs.

    In a torch.func.grad (or vjp) of the user's it comes to the calls to which this rank has a way:
    to none where one rank uses what a call gave, and another has the inputs behind it.
    """
    level = maybe_current_level()
    if level is None or _AUTOGRAD._current_graph_task_id() >= 0:
        return
    if not (calls := _book().calls_of(level)):
        return
    nodes = {call: node for call, made in calls.items() if (node := made()) is not None}
    used, run = _reached(roots, nodes), _reached(roots, nodes, inputs, accumulate=False)
    found = {(call, "used") for call in used} | {(call, "run") for call in run}
    if _of_all_ranks(calls, ("used", "run"), found, inside=True)[1]:
        raise MismatchError(
            "a derivative inside of a torch.func.grad (or vjp) of your own comes to other "
            f"collectives on each rank, of {_shown([*calls])}.",
            cause="ranks use what other calls gave, or differentiate by what is behind others: the "
            "adjoints would come to some ranks only, or to none.",
            fix="leave the outer derivative to fzero.grad_and_reduce, whose adjoints come to all "
            "ranks; or use each sum on every rank, loss + 0 * y.sum().",
        )


def of_an_edge(name: str) -> LayoutError:
    """Return the error of a backward that begins at an edge of a graph."""
    return LayoutError(
        f"{name} got a GradientEdge, after a collective was called.",
        cause="a loss that calls collectives is multiplied by its weight itself, and "
        "differentiated on every rank.",
        fix="give the loss, a tensor.",
    )


def unlike_nesting() -> MismatchError:
    """Return the error of ranks that differentiate a call inside of other transforms."""
    return MismatchError(
        "the ranks call a collective inside of other transforms of torch.func; here: "
        f"{modes.nesting() or 'none'}.",
        cause="torch.func.grad, jvp or vmap on some ranks only; or one inside of the other on one "
        "rank, and the other way round on another.",
        fix="nest the same transforms on every rank; a rank without anything to differentiate "
        "gives a constant inside of them.",
    )


def unlike_inputs() -> MismatchError:
    """Return the error of a derivative of the user's, of which only some ranks give the inputs."""
    return MismatchError(
        "torch.func.grad (or vjp) of your own around a collective to which only some ranks give "
        "what is differentiated.",
        cause="a constant in its place on other ranks, such as zeros of an expert without rows: "
        "the adjoint would come to no rank.",
        fix="give zeros + 0 * p.sum() in the place of the constant; or leave the derivative to "
        "fzero.grad_and_reduce, whose adjoints come to all ranks.",
    )
