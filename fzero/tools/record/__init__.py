"""A flight recorder: any recorded update again, elsewhere, and where two runs part.

record(step) -> calls it and remembers --> Recording --> replay, bisect, save, load_recording
"""

from fzero.tools.record.files import Recording as Recording
from fzero.tools.record.files import load_recording as load_recording
from fzero.tools.record.recorder import Recorder as Recorder
from fzero.tools.record.recorder import record as record
from fzero.tools.record.replay import Parting as Parting
from fzero.tools.record.replay import Replayed as Replayed
from fzero.tools.record.replay import bisect as bisect
from fzero.tools.record.replay import replay as replay
