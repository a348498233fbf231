"""A step as a compiled program: its graph, cut into segments at collectives.

compile(step) --> a step that is called as `step` is
    trace/         step, arguments -> one graph
    _passes        graph -> graph: fewer collectives, started earlier; less kept for the backward
    _writes        graph -> graph: no op writes; then results go where they end
    _random        which generator each draw is of, and where it stands before and after
    _segments      graph -> what runs, in order: segments, starts and waits of collectives
    _run           graph -> callable, with its inputs and outputs
    _check         a graph and its step, from one random state -> what differs
    _graph         step, arguments -> what runs in its place, agreed upon by all ranks
    _key           arguments -> what a graph is made for
    _surroundings  a step -> what it reads besides its arguments, and whether that is as it was
    _api           `compile`, and the cache of graphs by arguments
"""

from fzero.tools.compile.graphs import compile as compile
from fzero.tools.compile.passes import gather_early as gather_early
from fzero.tools.compile.passes import merge_collectives as merge_collectives
from fzero.tools.compile.passes import rematerialize as rematerialize
