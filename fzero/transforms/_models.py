"""Several models in one tree: which parameters, optimizer and stage belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import optree
import torch

from fzero.errors import CallError, LayoutError
from fzero.optim import NoOptimizer, Optimizer, TorchOptimizer
from fzero.state import NAMESPACE
from fzero.transforms.states import is_state

Model = tuple[Any, Any, Any, Any]  # params, optimizer, stage, mesh


def models_of(
    params: Any, optimizer: Any, stage: Any, mesh: Any
) -> tuple[list[Model], optree.PyTreeSpec]:
    """Return (params, optimizer, stage, mesh) of each model, and the structure that they are in.

    A number as `stage`, one optimizer or one mesh is that of all models; a tree of them has one for
    each. If none is a tree there is one model, whatever the structure of `params`.

    Raises `LayoutError`, naming the keys, if the trees do not fit each other.
    """
    given = {"stages": stage, "optimizers": optimizer, "meshes": mesh}
    specs = {of: _structure(x, _LEAVES[of]) for of, x in given.items()}
    trees = {of: spec for of, spec in specs.items() if not _is_one(spec)}
    if not trees:
        return [(params, optimizer, stage, mesh)], specs["stages"]
    of, treespec = next(iter(trees.items()))
    parts = _aligned(treespec, params, "init: the parameters", of)
    by: dict[str, list[Any]] = {
        what: _aligned(treespec, x, f"init: the {what}", of) if what in trees else [x] * len(parts)
        for what, x in given.items()
    }
    return [*zip(parts, by["optimizers"], by["stages"], by["meshes"], strict=True)], treespec


def meshes_of(mesh: Any, tree: Any, states: Sequence[Any]) -> list[Any]:
    """Return the mesh of each state of `tree`.

    Raises `LayoutError`, naming the keys, if `mesh` is a tree of other models.
    """
    treespec = _structure(mesh, is_mesh)
    if _is_one(treespec):
        return [mesh] * len(states)
    _aligned(treespec, tree, "shard: the states", "meshes")
    return leaves_of_meshes(mesh)


def leaves_of_meshes(mesh: Any) -> list[Any]:
    """Return the meshes of a tree of them; one mesh is its own."""
    found: list[Any] = optree.tree_leaves(
        mesh, is_leaf=is_mesh, none_is_leaf=True, namespace=NAMESPACE
    )
    return found or [mesh]


def is_mesh(node: Any) -> bool:
    """Whether a node of a tree of meshes is one: also {"data": 2, "seq": 4} is, and (2, 4).

    A list of numbers is a mistake for one, and is refused as a whole.
    """
    sizes: Any = node.values() if isinstance(node, Mapping) else node
    if isinstance(node, Mapping | list):
        return any(isinstance(size, int) for size in sizes)
    return isinstance(node, tuple)


def require_params(params: Any) -> None:
    """Raise `CallError` if an optimizer stands in the place of the parameters."""
    kinds = (Optimizer, TorchOptimizer, NoOptimizer, torch.optim.Optimizer, type)
    if isinstance(params, kinds) or _is_pair(params):
        if isinstance(params, tuple) and not all(map(callable, cast("tuple[Any, ...]", params))):
            raise CallError(
                "init got a tuple that begins with a function in the place of the parameters.",
                cause="what fzero.functionalize returns, as it is.",
                fix="apply, params = fzero.functionalize(module), then init(params, optimizer).",
            )
        name = params.__name__ if isinstance(params, type) else type(params).__name__
        raise CallError(
            f"init got an optimizer ({name}) in the place of the parameters.",
            cause="its arguments in another order.",
            fix="call it as init(params, optimizer, stage=2), or step.init(params, optimizer).",
        )


def stages_of(stage: Any, tree: Any, states: Sequence[Any]) -> list[tuple[Any, int, str]]:
    """Return (state, its stage, its path in the tree) for each state of `tree`.

    Raises `LayoutError`, naming the keys, if `stage` is a tree of other models.
    """
    treespec = _structure(stage)
    if _is_one(treespec):
        return [(state, stage, "") for state in states]
    found = _aligned(treespec, tree, "shard: the states", "stages")
    wheres = ["".join(f"[{key!r}]" for key in path) for path in treespec.paths()]
    for state, where in zip(found, wheres, strict=True):
        if not is_state(state):
            raise _misfit(f"shard: there is a {type(state).__name__} of states at {where}")
    stages = optree.tree_leaves(stage, namespace=NAMESPACE)
    return list(zip(found, stages, wheres, strict=True))


def _structure(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> optree.PyTreeSpec:
    """The structure of a tree of stages, optimizers or meshes."""
    return optree.tree_structure(
        tree, is_leaf=is_leaf or _is_pair, none_is_leaf=True, namespace=NAMESPACE
    )


def _is_pair(node: Any) -> bool:
    """Whether it is an (init, update) pair, which is one optimizer."""
    return isinstance(node, tuple) and any(map(callable, node))  # also a wrong one, to be refused


_LEAVES: dict[str, Callable[[Any], bool]] = {
    "stages": _is_pair,
    "optimizers": _is_pair,
    "meshes": is_mesh,
}


def _is_one(treespec: optree.PyTreeSpec) -> bool:
    return treespec.num_nodes == 1  # an empty container, too: it will be refused as what it is


def _aligned(treespec: optree.PyTreeSpec, tree: Any, what: str, of: str) -> list[Any]:
    """The parts of `tree` (that is `what`) at the leaves of `treespec`, the structure `of`."""
    try:
        return treespec.flatten_up_to(tree)
    except ValueError as error:  # it names the keys, and then shows all values
        raise _misfit(f"{what} do not fit the {of}: {error!s:.200}") from None


def _misfit(seen: str) -> LayoutError:
    return LayoutError(
        f"{seen}.",
        cause="a model without a stage or an optimizer, or under another name.",
        fix="give each model one of everything under the same key, as in "
        'shard(step, stage={"g": 2, "d": 3}).init({"g": ..., "d": ...}, {"g": ..., "d": ...}).',
    )
