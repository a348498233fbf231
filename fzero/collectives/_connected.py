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
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor

from fzero.collectives._kept import UsersCall, node_around, runs
from fzero.collectives._performers import agreed
from fzero.context import levels
from fzero.context.here import current_ranks
from fzero.errors import MismatchError
from fzero.ranks.mesh import Axis

_TORCH: Any = torch
_AUTOGRAD: Any = _TORCH._C  # what is asked of a graph task has no types

WORD, WORDS = 60, 2
"""How many calls are told in one number, and how many such numbers in one round."""


class Scope:
    """Where calls are made that one backward may differentiate.

    Attributes:
        level: of torch.func, at which they are differentiated; 0 is autograd's own.
        anchor: a tensor without elements by which it differentiates: that of a rank with no graph.
        tokens: of each call that any rank differentiates at this level, in their order. Of one in a
            reentrant checkpoint of torch's, the node of that, which gives no token.
    """

    def __init__(self, level: int = 0, anchor: Tensor | None = None) -> None:
        self.level, self.anchor = level, anchor
        self.tokens: dict[UsersCall, Any] = {}
        self._task = _AUTOGRAD._current_graph_task_id()

    def add(self, call: UsersCall, token: Any, *, backward: bool) -> None:
        """Take the token of a call, unless a checkpoint has made it anew in a backward."""
        anew = not backward and _AUTOGRAD._current_graph_task_id() != self._task
        if isinstance(token, Tensor):
            token = levels.at_level(token, self.level)
        if not anew and (token.requires_grad if isinstance(token, Tensor) else not self.level):
            self.tokens[call] = token


class _Book:
    """What a rank knows of its calls: how many there were on each set of ranks, and the scopes."""

    def __init__(self) -> None:
        self.counts = Counter[Axis]()
        self.scopes = weakref.WeakSet[Scope]()  # one of an engine goes with it


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
            run.tokens.append(token)
            return
    node = node_around()
    for scope in _book().scopes:
        scope.add(call, token if node is None else node, backward=backward)


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
    scope, scopes = Scope(level, anchor), _book().scopes
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


class _Probe(torch.autograd.Function):
    """Asks at the beginning of a graph task which nodes it will run, and ends it."""

    @staticmethod
    def forward(ctx: Any, nodes: list[Any], found: list[bool], *roots: Tensor) -> Tensor:
        ctx.nodes, ctx.found = nodes, found
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        ctx.found += map(_AUTOGRAD._will_engine_execute_node, ctx.nodes)
        raise _Stop


def _reached(roots: Sequence[Tensor], tokens: dict[UsersCall, Any], inputs: Any) -> set[UsersCall]:
    """Return the calls that a backward from these roots comes to."""
    found = list[bool]()
    with torch.enable_grad():
        nodes = [_node(token) for token in tokens.values()]
        probe: Any = cast(Any, _Probe).apply(nodes, found, *roots)
    if not probe.requires_grad:
        return set()
    with suppress(_Stop):
        torch.autograd.backward(probe, inputs=inputs)
    return {call for call, is_on in zip(tokens, found, strict=True) if is_on}


def unreached(
    roots: Sequence[Tensor], scope: Scope, *, inputs: Any = None
) -> tuple[list[Tensor], bool]:
    """Return the tokens that a root is to be tied to, for a backward that is made on all ranks.

    They are those of calls in the scope that the backward of another rank reaches, also by its own
    tokens. And whether any rank reaches a call. A call of all ranks that have made those of the
    scope. Raises `MismatchError`, on all of them, where a backward by `inputs` cannot reach them.
    """
    held, connects, again = dict[UsersCall, Any](), False, bool(scope.tokens)
    tokens = dict(scope.tokens)
    while again:
        again, more = False, set[UsersCall]()
        reached = _reached([*roots, *_tensors(held)], tokens, inputs)
        # In one order on all ranks: axes of one size in that of their calls, and not of a hash.
        for axis in sorted(dict.fromkeys(c.axis for c in tokens), key=lambda axis: axis.size):
            mine = [call for call in tokens if call.axis == axis]
            stuck = not reached.issuperset(held)
            everyone, unlike = _of_all_ranks(mine, reached, axis, stuck=stuck)
            more, again = more | (everyone - reached), again or unlike
            connects = connects or bool(everyone)
        held |= {call: tokens[call] for call in more}
    return _tensors(held), connects


def _tensors(tokens: dict[UsersCall, Any]) -> list[Tensor]:
    return [token for token in tokens.values() if isinstance(token, Tensor)]


def _node(token: Any) -> Any:
    return token.grad_fn if isinstance(token, Tensor) else token


def come_to(scope: Scope) -> str:
    """Return which calls of a scope the backward in which this is asked comes to, as a text.

    Ranks that come to others follow no common plan: one would wait where another never comes.
    """
    on = _AUTOGRAD._will_engine_execute_node
    reached = [call for call, token in scope.tokens.items() if on(_node(token))]
    return f"its backward comes to {_shown(reached)}" if reached else ""


def _of_all_ranks(
    calls: Sequence[UsersCall], reached: set[UsersCall], axis: Axis, *, stuck: bool
) -> tuple[set[UsersCall], bool]:
    """Return those of the calls that any rank reaches, and whether some rank does not."""
    everyone, unlike, full = set[UsersCall](), False, 2**WORD - 1
    text = f"the backward of a loss that has called {_shown(calls)}"
    for start in range(0, len(calls), WORD * WORDS):
        some = calls[start : start + WORD * WORDS]
        words = [some[i : i + WORD] for i in range(0, len(some), WORD)]
        bits = [sum(1 << i for i, one in enumerate(word) if one in reached) for word in words]
        heard = agreed(text, (stuck, *bits, *(full ^ x for x in bits)), axis)
        count = len(words)
        if heard[0]:
            raise _stuck()
        for word, any_on, any_off in zip(
            words, heard[1 : 1 + count], heard[1 + count :], strict=True
        ):
            everyone.update(one for i, one in enumerate(word) if any_on >> i & 1)
            unlike = unlike or bool(any_on & any_off)
    return everyone, unlike


def _shown(calls: Sequence[UsersCall]) -> str:
    numbers = [call.number for call in calls]
    same = blake2b(repr(numbers).encode(), digest_size=3).hexdigest()
    return f"{len(calls)} collectives, numbers {numbers[0]} to {numbers[-1]} ({same})"


def _stuck() -> MismatchError:
    return MismatchError(
        "the backward of a loss comes to collectives on some ranks that it does not reach on "
        "others.",
        cause="a backward by some tensors only (inputs=), which on another rank are not behind "
        "the collective; or a collective in torch.utils.checkpoint(use_reentrant=True), of which "
        "only some losses use what it gave.",
        fix="leave inputs= out; use_reentrant=False, or fzero.remat; or make the same use of the "
        "collectives on every rank: loss + 0 * y.sum().",
    )


def unlike_nesting() -> MismatchError:
    """Return the error of ranks that differentiate a call inside of other transforms."""
    return MismatchError(
        "the ranks call a collective inside of other transforms of torch.func; here: "
        f"{levels.nesting() or 'none'}.",
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
