"""Find the first difference of two runs beyond rounding: the operation, parameter and rank.

diff(Run(...), Run(...)) --> Difference, or None
diff(run, other)         the same of two training loops, which tell a Log what they make
"""

from fzero.tools.diff.compare import Difference as Difference
from fzero.tools.diff.compare import GradientDifference as GradientDifference
from fzero.tools.diff.compare import LoopDifference as LoopDifference
from fzero.tools.diff.compare import Moment as Moment
from fzero.tools.diff.loops import Log as Log
from fzero.tools.diff.run import Run as Run
from fzero.tools.diff.run import diff as diff
