"""Where do two runs first differ by more than rounding: the operation, parameter and rank.

diff(Run(...), Run(...)) --> Difference, or None
"""

from fzero.diff._diff import diff as diff
from fzero.diff._difference import Difference as Difference
from fzero.diff._difference import Moment as Moment
from fzero.diff._run import Run as Run
