"""Is a sharded step the step of one process? Checked in a matrix of cells, combinations of options.

certify(model, loss, batches) --> Report
    .cells, .failures, .to_dict()     the data
    print(report), _repr_html_()      as a table
"""

from fzero.tools.certify._compare import CellDifference as CellDifference
from fzero.tools.certify._compare import Check as Check
from fzero.tools.certify._matrix import certify as certify
from fzero.tools.certify._report import CellResult as CellResult
from fzero.tools.certify._report import Report as Report

Difference = CellDifference  # the older name; `fzero.tools.Difference` is of `fzero.diff`
