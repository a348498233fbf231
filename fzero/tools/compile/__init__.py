"""A step as a compiled program: its graph, in segments between collectives.

compile(step) --> a step that is called as `step` is
    trace/         step, arguments -> one graph
    _passes        graph -> graph: fewer collectives, started earlier; less kept for the backward
    _writes        graph -> graph: no op writes; then results go where they end
    _segments      graph -> what runs, in order: segments, starts and waits of collectives
    _run           a graph with its passes; what goes in and comes out
    _closure       what the functions of a step hold
    _api           which graph is for which arguments
"""

from fzero.tools.compile._api import compile as compile
from fzero.tools.compile._passes import gather_early as gather_early
from fzero.tools.compile._passes import merge_collectives as merge_collectives
from fzero.tools.compile._passes import rematerialize as rematerialize
