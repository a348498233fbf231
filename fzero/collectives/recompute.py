"""What collectives have returned in a part of a loss that is run again in its backward.

Such a part (`fzero.remat`, torch's checkpoints) is run again on the ranks whose backward comes to
it, each at its own time. So its first run keeps what each collective has returned, and its number;
when it is run again it is given that, and communicates in the adjoints alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch._C import _autograd as torch_autograd
from torch.utils import checkpoint

from fzero.context.current_rank import current_ranks
from fzero.errors import PhaseError
from fzero.ranks.mesh import Axis

_autograd: Any = torch_autograd  # what it has no types for
_TORCH: Any = torch
_Frame: Any = vars(checkpoint)["_CheckpointFrame"]  # of one call of a function under a checkpoint
_Reentrant: Any = vars(checkpoint.CheckpointFunction)["_backward_cls"]  # a node of the other kind


class UsersCall(NamedTuple):
    """A call by its number among those of its ranks."""

    axis: Axis  # all ranks that make it
    number: int


class Kept:
    """A call: what it has returned, and its number if it may be differentiated."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.call: UsersCall | None = None
        self._values: Any = None

    def number(self, call: UsersCall | None) -> None:
        """Note the number of the call, once all ranks have come to it."""
        self.call = call

    def values(self, make: Callable[[], Any]) -> Any:
        """Return what the call returns, which `make` gives the first time."""
        if self._values is None:
            made = make()
            self._values = _copied(made)  # the function may write to what it gets
            return made
        return _copied(self._values)


def _copied(values: Any) -> Any:
    return [x.clone() if isinstance(x, Tensor) else x for x in values]


class Block(list[Kept]):
    """The calls of one part of a loss, in their order."""

    @property
    def calls(self) -> list[UsersCall]:
        """Those that may be differentiated."""
        return [kept.call for kept in self if kept.call is not None]


class PartRun:
    """A run of a part of a loss.

    Attributes:
        tokens: of the calls in it, if its graph is another one than that of the loss; else None.
        anchor: of a later run: the tensor by which all of its calls have a graph.
    """

    def __init__(self, block: Block, *, again: bool, own_graph: bool, anchor: Tensor) -> None:
        self._block, self._next = block, 0 if again else None
        self.tokens: dict[UsersCall, Tensor] | None = {} if own_graph else None
        self.anchor = anchor

    def kept(self, what: str) -> Kept | None:
        """Return what the next call has returned in the first run; None in the first run."""
        if self._next is None:
            return None
        if self._next == len(self._block) or self._block[self._next].what != what:
            raise _unlike(what)
        self._next += 1
        return self._block[self._next - 1]

    def keep(self, kept: Kept) -> None:
        """Add a call of the first run."""
        self._block.append(kept)

    def end(self) -> None:
        """Raise `PhaseError` if a later run has made less calls than the first."""
        if self._next is not None and self._next < len(self._block):
            raise _unlike("nothing more")


class _Runs:
    """The runs of a rank: of `remat` those around this call, and those of torch's checkpoints."""

    def __init__(self) -> None:
        self.around: list[PartRun] = []
        self.blocks = WeakKeyDictionary[Any, Block]()  # by checkpoint; goes with its graph
        self.by_hook = WeakKeyDictionary[Any, PartRun]()

    def set(self, around: list[PartRun]) -> None:
        """Let these be the runs around what is called now."""
        self.around = around


_RUNS = _Runs()


def _runs_here() -> _Runs:
    here = current_ranks()
    return _RUNS if here is None else here.kept.setdefault(_Runs, _Runs())


def runs() -> list[PartRun]:
    """Return the runs around this call, the innermost last."""
    here = _runs_here()
    if _autograd._top_saved_tensors_default_hooks(True) is None:
        return here.around
    with without_hooks() as hooks:
        found = [_of_hook(here, pack) for pack, _ in reversed(hooks)]
    return [*here.around, *[run for run in found if run and run not in here.around]]


def _of_hook(here: _Runs, pack: Any) -> PartRun | None:
    """Return the run of a checkpoint, which packs what is saved in it.

    In the first run `pack` knows the frame, in a later one it has a reference to it.
    """
    cells = [cell.cell_contents for cell in getattr(_inner(pack), "__closure__", None) or ()]
    frames = [x for x in cells if isinstance(x, _Frame)]
    again: list[Any] = [x() for x in cells if isinstance(x, ref) and isinstance(x(), _Frame)]
    for frame in frames + again:
        block = here.blocks.setdefault(frame, Block())
        if pack not in here.by_hook:
            anchor = torch.zeros(0, requires_grad=True)
            here.by_hook[pack] = PartRun(
                block, again=bool(again), own_graph=bool(again), anchor=anchor
            )
        return here.by_hook[pack]
    return None


def _inner(pack: Any) -> Any:
    while (wrapped := getattr(pack, "__wrapped__", None)) is not None:
        pack = wrapped
    return pack


def keeping(what: str) -> tuple[Kept | None, PartRun | None]:
    """Return where a call in parts of a loss is kept; and the run that is given it, if one is."""
    if isinstance(_TORCH._C._current_autograd_node(), _Reentrant):
        raise _reentrant(what)
    found, run, first = None, None, list[PartRun]()
    for run in reversed(runs()):
        found = run.kept(what)
        if found is not None:
            break
        first.append(run)
    else:
        run = None
    if found is None and first:
        found = Kept(what)
    for one in first:
        assert found is not None
        one.keep(found)
    return found, run


@contextmanager
def without_hooks() -> Generator[list[Any]]:
    """Take the hooks of what autograd saves away in this block; the innermost is first."""
    hooks: list[Any] = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield hooks
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def run_of(block: Block, anchor: Tensor | None = None) -> Generator[PartRun]:
    """Run a part of a loss in this block: with an anchor again, without for the first time."""
    here, around = _runs_here(), runs()
    if anchor is None:
        block.clear()
    again = anchor is not None
    given = torch.zeros(0) if anchor is None else anchor
    run, before = PartRun(block, again=again, own_graph=True, anchor=given), here.around
    here.set([*around, run])
    try:
        yield run
    finally:
        here.set(before)
    run.end()


def _reentrant(what: str) -> PhaseError:
    return PhaseError(
        f"a collective in a reentrant checkpoint: {what}.",
        cause="torch.utils.checkpoint(use_reentrant=True), which has no graph in the forward and "
        "runs the function again in the backward: nobody knows which ranks come there.",
        fix="use_reentrant=False, or fzero.remat: both keep what the collective has returned.",
    )


def _unlike(what: str) -> PhaseError:
    return PhaseError(
        "a part of a loss that is run again in the backward calls other collectives than it did "
        f"in the forward; here: {what}.",
        cause="fzero.remat or torch.utils.checkpoint around a function that depends on something "
        "that has changed since: a counter, a cache, an `if` on a value drawn anew.",
        fix="give what it depends on as an argument.",
    )
