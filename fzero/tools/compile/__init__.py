"""A step as a compiled program: its graph, cut into segments at collectives.

compile(step) --> a step that is called as `step` is
    graphs   `compile`, and what runs for one kind of arguments: recorded, compared with the step
             from one random state in its first call, agreed upon by all ranks
    key      what a graph is made for: arguments, and what the step reads besides them
    passes   graph -> graph: fewer collectives, started earlier, less kept for the backward; and
             from there to what runs in order: draws, segments, starts and waits of collectives
"""

from fzero.tools.compile.graphs import compile as compile
from fzero.tools.compile.passes import gather_early as gather_early
from fzero.tools.compile.passes import merge_collectives as merge_collectives
from fzero.tools.compile.passes import rematerialize as rematerialize
