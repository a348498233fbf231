"""Find the first difference of two runs beyond rounding: the operation, parameter and rank.

diff(Run(...), Run(...)) --> Difference, or None
"""

from fzero.tools.diff._diff import diff as diff
from fzero.tools.diff._difference import Difference as Difference
from fzero.tools.diff._difference import Moment as Moment
from fzero.tools.diff._run import Run as Run
