"""The baseline to beat: a smoothed byte bigram."""

import torch
from torch import Tensor

VOCAB = 256


def fit_bigram(train: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """`log p(b | a) = log((count(a b) + s) / (count(a .) + 256 s))` over adjacent bytes.

    Args:
        train: `[n]` uint8.
        smoothing: `s > 0`, added to every count, so that an unseen pair costs a finite loss.

    Returns:
        `[256, 256]` float64 natural logarithms; row `a`, column `b`; each row's `exp` sums to 1.

    Example:
        >>> fit_bigram(torch.tensor([1, 2, 1, 2, 1], dtype=torch.uint8))[1, 2].exp()
        tensor(0.0761, dtype=torch.float64)
    """
    text = train.long()
    pairs = torch.bincount(text[:-1] * VOCAB + text[1:], minlength=VOCAB * VOCAB)
    counts = pairs.view(VOCAB, VOCAB).double() + smoothing
    return (counts / counts.sum(1, keepdim=True)).log()


def bigram_loss(log_p: Tensor, windows: Tensor) -> float:
    """Mean of `-log p(next | this)` over the adjacent bytes of `windows: [b, t + 1]`, in nats.

    Example:
        >>> bigram_loss(fit_bigram(torch.zeros(1, dtype=torch.uint8)), torch.zeros(2, 9).byte())
        5.545...
    """
    text = windows.long()
    return -log_p[text[:, :-1], text[:, 1:]].mean().item()
