"""Find the first difference of two runs beyond rounding: the operation, parameter and rank.

diff(Run(...), Run(...)) --> Difference, or None
diff(run, other)         the same of two training loops, which tell a Log what they make
"""

from fzero.tools.diff._diff import diff as diff
from fzero.tools.diff._difference import Difference as Difference
from fzero.tools.diff._difference import GradientDifference as GradientDifference
from fzero.tools.diff._difference import LoopDifference as LoopDifference
from fzero.tools.diff._difference import Moment as Moment
from fzero.tools.diff._log import Log as Log
from fzero.tools.diff._run import Run as Run
