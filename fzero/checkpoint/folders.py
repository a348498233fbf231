"""A folder that is there whole, or as it was before: how a checkpoint is written, for others too.

kept -> make_folder -> files in it -> put_sealed, which names it -> sweep of all others
kept -> read_sealed -> problems -> require_whole
"""

from fzero.checkpoint._folders import LOCK as LOCK
from fzero.checkpoint._folders import Kind as Kind
from fzero.checkpoint._folders import PathLike as PathLike
from fzero.checkpoint._folders import digest_of_file as digest_of_file
from fzero.checkpoint._folders import kept as kept
from fzero.checkpoint._folders import make_folder as make_folder
from fzero.checkpoint._folders import path_everywhere as path_everywhere
from fzero.checkpoint._folders import require_whole as require_whole
from fzero.checkpoint._folders import sweep as sweep
from fzero.checkpoint._sealed import put_sealed as put_sealed
from fzero.checkpoint._sealed import read_sealed as read_sealed
from fzero.errors.json_form import DictForm as DictForm
from fzero.errors.json_form import problems as problems
