"""Pictures and tables of train states and traces: plain data, which matplotlib can draw.

partition_map(state) --> PartitionMap: which rank holds which elements of which leaf
    .segments, .to_dict()     the data
    .table()                  as text, without matplotlib
    .draw(ax), side_by_side   as a figure, with the extra `plots`
memory_timeline(trace) --> MemoryTimeline: bytes alive at each op, by kind, of a trace, which
                           `fzero.trace(step)(state, *args)` gives
"""

import typing

from fzero.context import lazy_import
from fzero.tools.plot.figure import MissingExtraError as MissingExtraError
from fzero.tools.plot.memory import MemoryRow as MemoryRow
from fzero.tools.plot.memory import MemoryTimeline as MemoryTimeline
from fzero.tools.plot.memory import memory_timeline as memory_timeline
from fzero.tools.plot.states import PartitionMap as PartitionMap
from fzero.tools.plot.states import Segment as Segment
from fzero.tools.plot.states import Span as Span
from fzero.tools.plot.states import partition_map as partition_map
from fzero.tools.plot.states import side_by_side as side_by_side

if not typing.TYPE_CHECKING:
    __getattr__ = lazy_import.gone(
        __name__,
        {
            'trace.diff(other, only="collectives")': [
                "schedule_diff",
                "ScheduleDiff",
                "ScheduleRow",
            ],
            "torch.profiler.profile, and its export_chrome_trace for Perfetto": [
                "measured_timeline",
                "draw_timelines",
                "StepTimeline",
                "StepEvent",
            ],
            "print the records that the transitions of fzero.state.hooks return": [
                "hook_timeline",
                "HookTimeline",
                "HookEvent",
            ],
        },
    )
