"""Pictures and tables of a train state and of its hooks. Plain data first; matplotlib to draw it.

partition_map(state) --> PartitionMap: which rank holds which elements of which leaf
    .segments, .to_dict()     the data
    .table(), _repr_html_()   as text and as HTML, without matplotlib
    .draw(ax), side_by_side   as a figure, with the extra `plots`
shard_table(state) --> ShardTable: every rank's shards, gradients, moments and counters, by value
hook_timeline(events) --> HookTimeline: what the hook record went through in a backward
    .table(), _repr_html_(), .draw(ax)
"""

from fzero.plot._extra import MissingExtraError as MissingExtraError
from fzero.plot._figure import side_by_side as side_by_side
from fzero.plot._map import PartitionMap as PartitionMap
from fzero.plot._map import Segment as Segment
from fzero.plot._map import Span as Span
from fzero.plot._map import partition_map as partition_map
from fzero.plot._table import ShardRow as ShardRow
from fzero.plot._table import ShardTable as ShardTable
from fzero.plot._table import shard_table as shard_table
from fzero.plot._timeline import HookEvent as HookEvent
from fzero.plot._timeline import HookTimeline as HookTimeline
from fzero.plot._timeline import hook_timeline as hook_timeline
