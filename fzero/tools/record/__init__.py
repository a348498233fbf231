"""A flight recorder: any recorded update again, elsewhere, and where two runs part.

record(step) -> calls it and remembers --> Recording --> replay, bisect, save, load_recording
"""

from fzero.tools.record._bisect import Parting as Parting
from fzero.tools.record._bisect import bisect as bisect
from fzero.tools.record._record import record as record
from fzero.tools.record._recorder import Recorder as Recorder
from fzero.tools.record._recording import Recording as Recording
from fzero.tools.record._recording import load_recording as load_recording
from fzero.tools.record._replay import Replayed as Replayed
from fzero.tools.record._replay import replay as replay
