"""Bytes, collectives, peak memory and estimated time of a step, for any number of ranks.

plan(model, batch, stage=3, world=1024) --> Plan
    .bytes, .peak, .collectives, .wire_bytes, .ranks, .time     the data
    print(plan), _repr_html_()                                  as a table
plan.of_step(step, params, optimizer, *args, world=1024)        the same of a step of your own
plan.compare(model, batch, world=1024) --> Comparison           of stages
plan.smallest_world(model, batch, stage=3, fits_bytes=80e9) --> Plan

The step runs on one rank, on tensors without values; the other ranks are assumed to do the same.
"""

from fzero.tools.plan._plan import Planner as Planner
from fzero.tools.plan.records import Comparison as Comparison
from fzero.tools.plan.records import Plan as Plan
from fzero.tools.plan.records import RankShare as RankShare
from fzero.tools.plan.records import Rates as Rates
from fzero.tools.plan.records import Time as Time
from fzero.tools.plan.records import Traffic as Traffic

plan = Planner()
"""`fzero.plan`: called, it plans one step; its methods compare plans and look for a world."""
