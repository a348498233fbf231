"""Tools over the public API, which inspect a step. No step needs them to run.

trace, compile  the step as one graph of ops, and that graph compiled
plan            memory, traffic and time of a step on any number of ranks, without the hardware
record          any recorded update again, and where a run went wrong
certify, diff   is a step that of one process; where do two runs differ first (`rounding`: shared)
plot            pictures of states, plans and traces
doctor          tests the collectives of this installation

Each is imported when it is first used.
"""

import typing

from fzero.context import later

if typing.TYPE_CHECKING:  # what `__getattr__` imports
    from fzero.tools import certify as certify
    from fzero.tools import compile as compile
    from fzero.tools import diff as diff
    from fzero.tools import doctor as doctor
    from fzero.tools import plan as plan
    from fzero.tools import plot as plot
    from fzero.tools import prove as prove
    from fzero.tools import record as record
    from fzero.tools import rounding as rounding
    from fzero.tools import trace as trace
else:
    __getattr__ = later.importer(
        __name__,
        [
            "fzero.tools.certify",
            "fzero.tools.compile",
            "fzero.tools.diff",
            "fzero.tools.doctor",
            "fzero.tools.plan",
            "fzero.tools.plot",
            "fzero.tools.prove",
            "fzero.tools.record",
            "fzero.tools.rounding",
            "fzero.tools.trace",
        ],
    )
