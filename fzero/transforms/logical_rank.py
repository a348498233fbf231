"""What cannot stand beside logical ranks: it would depend on the ranks that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import optree
from torch import Tensor

from fzero.context.current_rank import read_elsewhere
from fzero.context.modes import needs_func, wants_graph
from fzero.errors import PhaseError
from fzero.machine.compress import codecs_asked
from fzero.ranks.mesh import Runs, carried_here
from fzero.state import NAMESPACE, Setup, TrainState
from fzero.state.codec import cast
from fzero.state.points import Builtin, Excludes
from fzero.transforms.together import Requested

_OF_A_RANK = "what is lost, kept or drawn by a rank, of which there may be any number."


def _seed_alone(options: Any) -> str:
    alone = options.logical_ranks is None and options.seed != 0
    return f"seed={options.seed} without logical_ranks=." if alone else ""


def _encoded(options: Any) -> str:
    if options.logical_ranks is None:
        return ""
    asked = codecs_asked(options)
    lossy = [
        f"{name}={codec}"
        for name, codec in (("gradients", asked.gradients), ("parameters", asked.parameters))
        if codec is not None and not isinstance(codec, cast)
    ]
    if lossy:
        return f"compress: {', '.join(lossy)} with logical_ranks={options.logical_ranks}."
    replicas = asked.over != "all" and asked.gradients is not None
    return f"compress: over={asked.over!r} with logical_ranks." if replicas else ""


def _local(options: Any) -> str:
    there = options.logical_ranks is not None and options.local is not None
    return f"local updates with logical_ranks={options.logical_ranks}." if there else ""


def _kept_at_local(options: Any) -> str:
    if options.logical_ranks is None:
        return ""
    some = [one.name for one in options.transforms if one.local is not None and one.init]
    return f"the transform {some[0]!r} keeps slots at `local`, with logical_ranks." if some else ""


def _too_many(asked: Requested) -> str:
    logical, size = asked.options.logical_ranks, asked.axis.size
    there = logical is not None and size > logical
    return f"logical_ranks={logical}, and there are {size} ranks." if there else ""


def _named(asked: Requested) -> str:
    named = asked.axis.named
    there = asked.options.logical_ranks is not None and len(named) > 1
    return f"logical_ranks on a mesh of the named axes {dict(named)}." if there else ""


def _rounds_at_random(known: Any) -> str:
    rule, options = known
    precision = getattr(rule, "precision", None)  # a rule of a user's own has none
    there = options.logical_ranks is not None and getattr(precision, "stochastic_rounding", False)
    return "stochastic_rounding with logical_ranks." if there else ""


_GRAPH = Excludes(
    beside="a transform of torch.func, or a trace, around the step; arguments that require grad",
    when="graph",
    seen=lambda _: (
        "a state with logical_ranks, and the step is differentiated, mapped or traced as a whole, "
        "or an argument requires grad."
    ),
    cause="a torch.func transform around grad_and_reduce, or a batch that another model made.",
    fix="give the step batch.detach(); transforms inside the loss are fine. Without logical_ranks "
    "a step can be differentiated.",
)

_EXCLUDES = (
    Excludes(
        beside="a seed alone",
        when="options",
        seen=_seed_alone,
        cause="a seed for what the ranks draw: that is set by torch.manual_seed.",
        fix="give logical_ranks=, too: a seed is that of their generators.",
    ),
    Excludes(
        beside="a codec that is no cast",
        when="options",
        seen=_encoded,
        cause=f"a codec encodes the sum of a rank: {_OF_A_RANK}",
        fix="leave it out, or use a cast: fzero.codecs.cast(torch.bfloat16).",
    ),
    Excludes(
        beside="local updates",
        when="options",
        seen=_local,
        cause="replicas that train apart are ranks of which there may be any number.",
        fix="leave one of them out.",
    ),
    Excludes(
        beside="a transform with slots at `local`",
        when="options",
        seen=_kept_at_local,
        cause=_OF_A_RANK,
        fix="keep them at `reduced` or `updated`; a function at `local` without slots is fine.",
    ),
    Excludes(
        beside="more ranks than logical ranks",
        when="ranks",
        seen=_too_many,
        cause="more processes than the run was begun for: each rank carries at least one.",
        fix="start fewer ranks, or another run with more logical ranks.",
    ),
    Excludes(
        beside="a mesh of several named axes",
        when="ranks",
        seen=_named,
        cause="ranks that share a batch, or a layer: a logical rank would be a part of one.",
        fix="leave one of them out; (replicas, shards) is a mesh of logical ranks, too.",
    ),
    Excludes(
        beside="stochastic_rounding",
        when="rule",
        seen=_rounds_at_random,
        cause="it draws for the shard of a rank.",
        fix="keep master weights (master_weights=True) in its place.",
    ),
    _GRAPH,
)


def _refuse_others(state: TrainState, leaves: dict[int, Tensor]) -> None:
    """Let leaves refuse a gradient from the loss of another logical rank that runs beside."""
    owner = carried_here()
    if owner is None or owner.runs is not Runs.TOGETHER:
        return

    def look(index: int, _: Tensor) -> None:
        here = carried_here()
        if here is not None and here.rank != owner.rank:
            path = state.setup.layout.leaves[index].title
            raise read_elsewhere(path, f"logical rank {owner.rank}", f"logical rank {here.rank}")

    for index, leaf in leaves.items():
        leaf.register_hook(partial(look, index))


CARRIED = Builtin(
    name="logical_ranks",
    acts=lambda state: state.setup.logical is not None,
    leaves=_refuse_others,
    excludes=_EXCLUDES,
)
"""Logical ranks: what they exclude. They are a part of how gradients are summed."""


def require_own_backward(states: Sequence[TrainState], arguments: Any) -> None:
    """Raise `PhaseError` where gradients would be made by torch.func, and differentiated again."""
    flats = [flat for one in states for flat in one.params.flats]
    given = optree.tree_leaves(arguments, namespace=NAMESPACE)
    if needs_func(flats) or wants_graph([*flats, *given]):
        raise PhaseError(_GRAPH.seen(None), cause=_GRAPH.cause, fix=_GRAPH.fix)


def require_reduced_beside(setup: Setup) -> None:
    """Raise `PhaseError` for gradients of a rank that are no logical rank's."""
    if setup.logical is not None:
        raise PhaseError(
            "add_gradients: a gradient of this rank, and the state has logical ranks.",
            cause="gradients that were made outside of grad_and_reduce, for all rows of a rank.",
            fix="give their mean over all ranks with reduced=True, or let grad_and_reduce "
            "differentiate a loss that has this gradient.",
        )
