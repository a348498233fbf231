"""The first call of a graph: the step runs, too, and both are to give the same.

Digests are compared, so that there is never a second new state. The step runs second: what a first
call returns, and what it leaves behind, is the step's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.machine.packing import digest
from fzero.state import NAMESPACE
from fzero.tools.compile._random import Randomness
from fzero.tools.compile._run import Compiled
from fzero.tools.trace.program import unfused_recurrence


def compare(
    plain: Compiled,
    arguments: Any,
    step: Callable[[], Any],
    drawn: Randomness,
    paths: Sequence[str],
) -> tuple[str, Any]:
    """Run a graph and then its step, from one random state.

    paths: of the tensors in what is returned. Where the graph raises, its collectives go on.

    Returns:
        What differs, "" if nothing does; and what the step returned.
    """
    found, made = [one for one, _ in drawn.begins], drawn.made
    before, unused = _states(found), _states(made)
    known, seen = list[Any](), ""
    rest = iter(plain.actions)
    try:
        known = _facts(replace(plain, actions=rest)(arguments))
    except Exception as error:
        seen = f"the graph raises {type(error).__name__}: {error}"
        for action in rest:  # on this rank alone, perhaps: the others wait for it
            action.take_part()
    after = _states(found)
    for one, state in zip((*found, *made), (*before, *unused), strict=True):
        one.set_state(state)
    with unfused_recurrence():
        returned = step()
    names = iter(paths)
    for a, b in zip(known, _facts(returned), strict=False):
        name = next(names, "") if isinstance(a, _Digest) else "value"
        seen = seen or ("" if a == b else f"its graph returns another {name}")
    if not _alike(after, _states(found)):
        seen = seen or "its graph leaves another random state"
    if not _alike(unused, _states(made)):
        seen = seen or "it draws from a torch.Generator that it finds where nobody looks"
    return seen, returned


class _Digest(tuple[Any, ...]):
    """What a tensor is told apart by: dtype, shape, and a digest of its bits."""


def _facts(tree: Any) -> list[Any]:
    leaves, treespec = optree.tree_flatten(tree, namespace=NAMESPACE)
    return [*map(_fact, leaves), treespec]


def _fact(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _Digest((x.dtype, x.shape, x.device, x.requires_grad, digest(x)))
    return repr(x) if isinstance(x, float | complex) else x


def _states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    return [one.get_state() for one in generators]


def _alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, some, others))
