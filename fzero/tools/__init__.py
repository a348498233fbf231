"""Tools over the public API, which inspect a step. No step needs them to run.

trace, compile  the step as one graph of ops, and that graph compiled
plan            memory, traffic and time of a step on any number of ranks, without the hardware
record          any recorded update again, and where a run went wrong
certify, diff   is a step that of one process; where do two runs differ first (`rounding`: shared)
prove           a proof that the update of all ranks is that of one
plot            pictures of states and of traces
doctor          tests the collectives of this installation

The functions are names of `fzero`; the records that they take and return are here, as are the
modules. Each is imported when it is first used.
"""

import typing

from fzero.context import lazy_import

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
    from fzero.tools.diff import Difference as Difference
    from fzero.tools.diff import Run as Run
    from fzero.tools.prove import Claim as Claim
    from fzero.tools.prove import Proof as Proof
    from fzero.tools.record import Parting as Parting
    from fzero.tools.record import Recorder as Recorder
    from fzero.tools.record import Recording as Recording
    from fzero.tools.record import Replayed as Replayed
else:
    _MODULES = [
        "certify",
        "compile",
        "diff",
        "doctor",
        "plan",
        "plot",
        "prove",
        "record",
        "rounding",
        "trace",
    ]
    __getattr__ = lazy_import.importer(
        __name__,
        [f"fzero.tools.{name}" for name in _MODULES],
        {
            "fzero.tools.diff": ["Difference", "Run"],
            "fzero.tools.prove": ["Claim", "Proof"],
            "fzero.tools.record": ["Parting", "Recorder", "Recording", "Replayed"],
        },
    )
