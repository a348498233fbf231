"""One table of options: what `init`, `shard`, `Engine`, `plan` and `certify` take, said once.

In: nothing but types of the mesh and the state. Out: `OPTIONS`, an `Option` for each name, with its
default, type, check, help, stages, DeepSpeed's key, and why a driver does not take it; typed
keywords for signatures, which a test compares with the table; and `takes`, which makes a driver's
signature, docstring and errors of it. docs/support.md and the DeepSpeed reader read it, too.
"""

from fzero.options._of_state import BUCKET_BYTES as BUCKET_BYTES
from fzero.options._record import REQUIRED as REQUIRED
from fzero.options._record import Option as Option
from fzero.options._takes import OPTIONS as OPTIONS
from fzero.options._takes import check_values as check_values
from fzero.options._takes import documents as documents
from fzero.options._takes import taken_by as taken_by
from fzero.options._takes import takes as takes
from fzero.options._typed import Initializer as Initializer
from fzero.options._typed import InitOptions as InitOptions
from fzero.options._typed import Own as Own
from fzero.options._typed import Scale as Scale
from fzero.options._typed import Stages as Stages
from fzero.options._typed import StateOptions as StateOptions

DRIVERS = ("init", "shard", "Engine", "plan")
"""Who takes options; `certify` takes axes, of which an `Option` names its own."""
