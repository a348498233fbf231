"""Where data stands, as a value: which rows come next, for any number of ranks.

In: the length of a data set, the seed, how many batches were trained on.
Out: ids of rows. `order` is pure; `loader` gives the ids to
torch.utils.data.DataLoader, and pairs its batches with the order after each.
"""

from fzero.data.loader import BatchSampler as BatchSampler
from fzero.data.loader import batches as batches
from fzero.data.order import Order as Order
from fzero.state.batch import Parts as Parts
