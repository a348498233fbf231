"""`python -m fzero doctor`: are collectives and their gradients right in this installation?

    cells    collective x transform x dtype, on 2 ranks of gloo, which are started for it
    verdict  right: equal bit for bit to a formula of one process, on whole numbers that are exact
             in every dtype; wrong; zero: silently, where it must not be; refused: it raised

The formula is differentiated by the same transform, on all ranks' inputs stacked in one process.
"""

import typing

from fzero.context import later
from fzero.tools.doctor._report import DoctorReport as DoctorReport
from fzero.tools.doctor._report import examine as examine
from fzero.tools.doctor._subjects import CollectiveSubject as CollectiveSubject

if not typing.TYPE_CHECKING:
    __getattr__ = later.gone(__name__, {"examine(subjects, dtypes=...)": ["Section"]})
