"""Is a sharded step the step of one process? Checked in a matrix of cells, combinations of options.

certify(model, loss, batches) --> Report
    .cells, .failures, .to_dict()     the data
    print(report), _repr_html_()      as a table
AXES                                  what the matrix consists of
"""

from fzero.tools.certify.matrix import AXES as AXES
from fzero.tools.certify.matrix import CellDifference as CellDifference
from fzero.tools.certify.matrix import CellResult as CellResult
from fzero.tools.certify.matrix import CertifyAxis as CertifyAxis
from fzero.tools.certify.matrix import Check as Check
from fzero.tools.certify.matrix import Report as Report
from fzero.tools.certify.run import certify as certify

Difference = CellDifference  # the older name; `fzero.tools.Difference` is of `fzero.diff`
