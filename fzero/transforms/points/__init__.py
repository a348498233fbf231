"""The points of a step: what transforms do there, and the slots that they keep in a state.

`transform` makes one from pure functions; `reduced`, `step_in_transforms`, `at_loss` and
`ByPath` run those of a state; `begun_slots` makes the slots of a new one.
"""

from fzero.transforms.points.context import Context as Context
from fzero.transforms.points.define import StepTransform as StepTransform
from fzero.transforms.points.define import require_excluded as require_excluded
from fzero.transforms.points.define import transform as transform
from fzero.transforms.points.define import transforms_apart as transforms_apart
from fzero.transforms.points.run import ByPath as ByPath
from fzero.transforms.points.run import CallPart as CallPart
from fzero.transforms.points.run import Changed as Changed
from fzero.transforms.points.run import Running as Running
from fzero.transforms.points.run import at_loss as at_loss
from fzero.transforms.points.run import changed_by as changed_by
from fzero.transforms.points.run import reduced as reduced
from fzero.transforms.points.run import step_in_transforms as step_in_transforms
from fzero.transforms.points.run import transforms_of as transforms_of
from fzero.transforms.points.slots import begun_slots as begun_slots
from fzero.transforms.points.slots import renewed as renewed
from fzero.transforms.points.slots import rule_state as rule_state
from fzero.transforms.points.slots import stepped_as_held as stepped_as_held
from fzero.transforms.points.slots import stepped_parts as stepped_parts
from fzero.transforms.points.slots import with_params as with_params
from fzero.transforms.points.slots import with_stepped as with_stepped
from fzero.transforms.points.slots import without_gradients as without_gradients
