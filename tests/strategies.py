"""Hypothesis strategies: worlds, stages, and pytrees of tensors of every kind that fzero takes.

All values are small integers, whatever the dtype, so that every sum over them is exact. What a
test needs of one tree (its leaves, which of them learn) it reads off the tree itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from fzero.state import NAMESPACE, record, static

MAX_RANKS = 4
EVERY_DTYPE = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
)
LEARNING = (torch.float64, torch.float32, torch.bfloat16)

worlds = st.integers(1, MAX_RANKS)
many = st.integers(2, MAX_RANKS)
stages = st.integers(0, 3)
seeds = st.integers(0, 2**16)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
keeps = st.sampled_from([True, False, "window"])


class Pair(NamedTuple):
    """A NamedTuple among the containers."""

    first: Any
    second: Any


@record
class Block:
    """A record among the containers: two children and a static name."""

    weight: Any
    bias: Any
    name: str = static(default="block")


def integers(
    shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float64, bound: int = 4
) -> Tensor:
    """Integers in [-bound, bound] (in [0, 2) for bool, [0, bound] for uint8) as `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.uint8, torch.bool) else -bound
    high = 2 if dtype is torch.bool else bound + 1
    return torch.randint(low, high, tuple(shape), generator=generator).to(dtype)


@st.composite
def leaves(draw: st.DrawFn, dtypes: Sequence[torch.dtype], frozen: bool = True) -> Tensor:
    """One tensor; with `frozen` sometimes an nn.Parameter that needs no grad, or a view."""
    value = integers(draw(shapes), draw(seeds), draw(st.sampled_from(list(dtypes))))
    kind = draw(st.sampled_from(["plain", "plain", "view", "parameter", "frozen"]))
    if kind == "view":
        return value.t() if value.ndim == 2 else value
    if kind == "plain" or not value.is_floating_point():
        return value
    return Parameter(value, requires_grad=not (frozen and kind == "frozen"))


@st.composite
def trees(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = EVERY_DTYPE,
    max_leaves: int = 7,
    frozen: bool = True,
    empty: bool = False,
    learning: bool = False,
) -> Any:
    """A nested pytree of dicts, lists, tuples, NamedTuples, records and None; some leaves tied.

    It has a tensor, unless it may be `empty`; one that learns, if it is to be `learning`.
    """
    leaf = leaves(dtypes, frozen)
    tree = draw(st.recursive(leaf | st.none(), _containers, max_leaves=max_leaves))
    tree = draw(st.sampled_from([tree, {"top": tree}, [tree, draw(leaf)]]))
    if not (empty or tensors(tree)):
        tree = (tree, draw(leaf))
    tree = _tied(tree, draw(st.lists(st.integers(0, 99), max_size=3)))
    if learning and not any(map(learns, tensors(tree))):
        floating = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        tree = (tree, draw(leaves(floating, frozen=False)))
    return tree


def _containers(child: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["w", "b", "layers", "a.b", "0"])
    return st.one_of(
        st.dictionaries(names, child, max_size=3),
        st.lists(child, max_size=3),
        st.tuples(child, child),
        st.builds(Pair, child, child),
        st.builds(Block, weight=child, bias=child, name=st.sampled_from(["x", "y"])),
    )


def _tied(tree: Any, picks: list[int]) -> Any:
    """Put the tensor of one position at another, for each pick."""
    found, treespec = optree.tree_flatten(tree, namespace=NAMESPACE)
    for pick in picks if len(found) > 1 else ():
        found[pick // 10 % len(found)] = found[pick % len(found)]
    return optree.tree_unflatten(treespec, found)


def unique(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order, each once."""
    return list({id(leaf): leaf for leaf in tensors(tree)}.values())


def tensors(tree: Any) -> list[Any]:
    """The leaves of a tree as fzero sees them: None is none."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def learns(leaf: Tensor) -> bool:
    """The rule of the contract: floating, and no nn.Parameter with requires_grad=False."""
    return leaf.is_floating_point() and (not isinstance(leaf, Parameter) or leaf.requires_grad)


def same(actual: Any, expected: Any) -> None:
    """Assert that two pytrees are equal: structure, dtypes, shapes and every bit."""
    spec = optree.tree_structure(actual, namespace=NAMESPACE)
    assert spec == optree.tree_structure(expected, namespace=NAMESPACE)
    for got, want in zip(tensors(actual), tensors(expected), strict=True):
        if isinstance(got, Tensor) and isinstance(want, Tensor):
            torch.testing.assert_close(got.detach(), want.detach(), rtol=0, atol=0, equal_nan=True)
        else:
            assert (type(got), got) == (type(want), want)


def on_rank(stacked: Any, rank: int) -> Any:
    """Rank's part of a result of `fzero.simulate`."""
    return optree.tree_map(
        lambda x: x[rank] if isinstance(x, Tensor) else x, stacked, namespace=NAMESPACE
    )


def everywhere(stacked: Any, expected: Any, ranks: int) -> None:
    """Assert that every virtual rank has `expected`."""
    for rank in range(ranks):
        same(on_rank(stacked, rank), expected)
