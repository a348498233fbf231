"""Pictures and tables of train states, hooks and traces: plain data, which matplotlib can draw.

partition_map(state) --> PartitionMap: which rank holds which elements of which leaf
    .segments, .to_dict()     the data
    .table(), _repr_html_()   as text and as HTML, without matplotlib
    .draw(ax), side_by_side   as a figure, with the extra `plots`
hook_timeline(events) --> HookTimeline: the hook record, event by event, in a backward
    .table(), _repr_html_(), .draw(ax)

Of a trace, which `fzero.trace(step)(state, *args)` gives:

memory_timeline(trace) --> MemoryTimeline: bytes alive at each op, by kind
schedule_diff(a, b) --> ScheduleDiff: the collectives of two traces side by side, a table

Of a step that runs:

measured_timeline(step)(state, *args) --> StepTimeline: compute and collectives, as they ran
    .to_perfetto(path), draw_timelines   for Perfetto; several in one figure
"""

from fzero.tools.plot._figure import MissingExtraError as MissingExtraError
from fzero.tools.plot._lanes import StepEvent as StepEvent
from fzero.tools.plot._map import PartitionMap as PartitionMap
from fzero.tools.plot._map import Segment as Segment
from fzero.tools.plot._map import Span as Span
from fzero.tools.plot._map import side_by_side as side_by_side
from fzero.tools.plot._measured import measured_timeline as measured_timeline
from fzero.tools.plot._memory import MemoryRow as MemoryRow
from fzero.tools.plot._memory import MemoryTimeline as MemoryTimeline
from fzero.tools.plot._memory import memory_timeline as memory_timeline
from fzero.tools.plot._partition import partition_map as partition_map
from fzero.tools.plot._schedule import ScheduleDiff as ScheduleDiff
from fzero.tools.plot._schedule import ScheduleRow as ScheduleRow
from fzero.tools.plot._schedule import schedule_diff as schedule_diff
from fzero.tools.plot._step import StepTimeline as StepTimeline
from fzero.tools.plot._step import draw_timelines as draw_timelines
from fzero.tools.plot._timeline import HookEvent as HookEvent
from fzero.tools.plot._timeline import HookTimeline as HookTimeline
from fzero.tools.plot._timeline import hook_timeline as hook_timeline
