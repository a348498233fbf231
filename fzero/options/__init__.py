"""One table of options: what `init`, `shard`, `Engine`, `plan` and `certify` take, said once.

In: records of the state, and those here, whose fields are options (`fzero.state.points`). Out:
`OPTIONS`, an `Option` for each, with its default, type, check, help, stages, DeepSpeed's key, and
why a driver does not take it; the same names as typed keywords for signatures, which a test
compares with the table; and `takes`, which makes a driver's signature, docstring and errors of it.
docs/support.md and the DeepSpeed reader read the table, too.
"""

from fzero.options.records import BUCKET_BYTES as BUCKET_BYTES
from fzero.options.records import EngineOptions as EngineOptions
from fzero.options.records import Initializer as Initializer
from fzero.options.records import InitOptions as InitOptions
from fzero.options.records import ModuleOptions as ModuleOptions
from fzero.options.records import Scale as Scale
from fzero.options.records import SharedOptions as SharedOptions
from fzero.options.records import Stages as Stages
from fzero.options.records import StateOptions as StateOptions
from fzero.options.records import StepOptions as StepOptions
from fzero.options.records import Updating as Updating
from fzero.options.records import grouped as grouped
from fzero.options.records import one_record as one_record
from fzero.options.table import OPTIONS as OPTIONS
from fzero.options.table import check_values as check_values
from fzero.options.table import documents as documents
from fzero.options.table import taken_by as taken_by
from fzero.options.table import takes as takes
from fzero.state.points import REQUIRED as REQUIRED
from fzero.state.points import Option as Option

DRIVERS = ("init", "shard", "Engine", "plan")
"""Who takes options; `certify` takes axes, of which an `Option` names its own."""
