"""The protocol of a rank: one record and one transition, which decide when every collective starts.

What comes in: events of a driver (`Begin`, `Use`, `Ready`, ...) and what the other ranks said
(`Answer`). What goes out: the next record, and effects in the order in which they are done. A
record has host integers, texts and tuples only; nothing here communicates, waits or holds a tensor.

All ranks that announce the same program run its collectives in its order, whatever they use
themselves (see `state.replay`). A rank that needs what the rest of the plan does not have runs the
plan to its end, and asks there: every rank takes part in what any rank asks for. At stage 3 a
program is recorded: what the ranks did before. Below stage 3 it is known: every bucket is reduced
once, the last one first. One plan runs at a time on the same ranks: where a pass of another model
begins in the middle of a pass, or asks, the plan of this one is run to its end first.
"""

from __future__ import annotations

from fzero.state.protocol.events import Announcement as Announcement
from fzero.state.protocol.events import Answer as Answer
from fzero.state.protocol.events import Begin as Begin
from fzero.state.protocol.events import Broke as Broke
from fzero.state.protocol.events import Call as Call
from fzero.state.protocol.events import Changed as Changed
from fzero.state.protocol.events import EndForward as EndForward
from fzero.state.protocol.events import Failed as Failed
from fzero.state.protocol.events import Finish as Finish
from fzero.state.protocol.events import FirstGradient as FirstGradient
from fzero.state.protocol.events import GiveUp as GiveUp
from fzero.state.protocol.events import Join as Join
from fzero.state.protocol.events import Leave as Leave
from fzero.state.protocol.events import Met as Met
from fzero.state.protocol.events import Noted as Noted
from fzero.state.protocol.events import Pin as Pin
from fzero.state.protocol.events import ProtocolEvent as ProtocolEvent
from fzero.state.protocol.events import Raised as Raised
from fzero.state.protocol.events import Ready as Ready
from fzero.state.protocol.events import SyncPoint as SyncPoint
from fzero.state.protocol.events import Unpin as Unpin
from fzero.state.protocol.events import Use as Use
from fzero.state.protocol.records import Course as Course
from fzero.state.protocol.records import Model as Model
from fzero.state.protocol.records import Protocol as Protocol
from fzero.state.protocol.transitions import SYNC as SYNC
from fzero.state.protocol.transitions import advance as advance
from fzero.state.residency import Residency as Residency
from fzero.state.residency import Units as Units
