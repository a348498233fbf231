"""The step as one flat graph of ops: every kernel and collective of one rank, with no number run.

trace(step)(state, batch) --> Trace
    print(t), t.ops            what runs, in order
    t.calls                    each op with its arguments, numbers and constants among them
    t.collectives, .wire_bytes, .flops, .live_bytes   counted; op.alive: by kind
    t.diff(other)              what two ranks, or two stages, do differently
check_spmd(step, state, args)  do all ranks make the same collectives?
"""

from fzero.tools.trace.calls import CalledOp as CalledOp
from fzero.tools.trace.calls import Constant as Constant
from fzero.tools.trace.calls import Operand as Operand
from fzero.tools.trace.ops import Alive as Alive
from fzero.tools.trace.ops import Op as Op
from fzero.tools.trace.ops import Value as Value
from fzero.tools.trace.trace import Trace as Trace
from fzero.tools.trace.trace import TraceDiff as TraceDiff
from fzero.tools.trace.trace import check_spmd as check_spmd
from fzero.tools.trace.trace import trace as trace
