"""A step as a compiled program: its graph, in segments between collectives.

compile(step) --> a step that is called as `step` is
    trace/         step, arguments -> one graph
    _passes        graph -> graph: fewer collectives, started earlier; less kept for the backward
    _segments      graph -> what runs, in order: segments, starts and waits of collectives
    _api           which graph is for which arguments; what goes in and comes out
"""

from fzero.compile._api import compile as compile
from fzero.compile._passes import gather_early as gather_early
from fzero.compile._passes import merge_collectives as merge_collectives
from fzero.compile._passes import rematerialize as rematerialize
