"""Do two runs agree up to rounding? Shared by `fzero.certify` and `fzero.diff`.

In: values, as pytrees or as the copies of a leaf on all ranks. Out: pytrees in another dtype or
perturbed; bounds, by how much another order of sums may change a number; and the element of a leaf
that exceeds its bound most. `fzero.certify` asks whether a cell is the step of one process, and
`fzero.diff` where two runs differ first. Nothing in this room runs a step or communicates.
"""

from fzero.tools.compare._numbers import Copy as Copy
from fzero.tools.compare._numbers import Found as Found
from fzero.tools.compare._numbers import Spread as Spread
from fzero.tools.compare._numbers import first_apart as first_apart
from fzero.tools.compare._numbers import furthest as furthest
from fzero.tools.compare._numbers import of_ranks as of_ranks
from fzero.tools.compare._numbers import replicas_apart as replicas_apart
from fzero.tools.compare._numbers import whole_leaf as whole_leaf
from fzero.tools.compare._rounding import CORNERS as CORNERS
from fzero.tools.compare._rounding import DISTURBANCE as DISTURBANCE
from fzero.tools.compare._rounding import MARGIN as MARGIN
from fzero.tools.compare._rounding import SMALLEST_UNIT as SMALLEST_UNIT
from fzero.tools.compare._rounding import TERMS as TERMS
from fzero.tools.compare._rounding import Coarsest as Coarsest
from fzero.tools.compare._rounding import coarser as coarser
from fzero.tools.compare._rounding import disturbed_bound as disturbed_bound
from fzero.tools.compare._rounding import disturbed_tree as disturbed_tree
from fzero.tools.compare._rounding import eps_of as eps_of
from fzero.tools.compare._rounding import largest as largest
from fzero.tools.compare._rounding import of_terms as of_terms
from fzero.tools.compare._rounding import perturbed as perturbed
from fzero.tools.compare._rounding import shift as shift
from fzero.tools.compare._rounding import signs_like as signs_like
from fzero.tools.compare._trees import cast as cast
from fzero.tools.compare._trees import copied as copied
from fzero.tools.compare._trees import copy_of_tree as copy_of_tree
from fzero.tools.compare._widen import WIDE as WIDE
from fzero.tools.compare._widen import Widened as Widened
