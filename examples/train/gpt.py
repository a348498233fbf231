"""A byte-level GPT: causal attention with rotary positions, tied embedding and head."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fzero import LayoutError
from train.option import COUNT, option

VOCAB = 256  # one token a byte
TEMPERATURE = 0.8  # of the draws; below 1 sharpens the distribution
TABLE_STD = 0.02  # of the new table of bytes, which is embedding and head


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of the model; `width / heads` must be an even whole number."""

    layers: int = option(6, "blocks ({})", **COUNT)
    width: int = option(256, "residual features ({})", **COUNT)
    heads: int = option(4, "attention heads ({})", **COUNT)
    # It is also the most that generation looks back.
    context: int = option(128, "bytes in a window ({})", **COUNT)

    def __post_init__(self) -> None:
        """Refuse heads that rotary positions cannot turn."""
        if self.width % (2 * self.heads):
            raise LayoutError(
                f"--width {self.width} with --heads {self.heads}: a head would have "
                f"{self.width / self.heads:g} features.",
                cause="one of the two was changed alone; rotary positions turn pairs of "
                "features, so a head needs an even whole number of them.",
                fix=f"make --width a multiple of 2 x heads = {2 * self.heads}.",
            )


class Block(nn.Module):
    """x: [b, t, c] -> [b, t, c]: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for layer in (self.qkv, self.out, self.up, self.down):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        with torch.no_grad():  # the 2 x layers additions to the stream keep its variance near 1
            self.out.weight.mul_((2 * config.layers) ** -0.5)
            self.down.weight.mul_((2 * config.layers) ** -0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the block; `cos` and `sin` are `[t, c / heads / 2]`."""
        qkv = self.qkv(self.norm1(x))
        q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, h=self.heads)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(rearrange(mixed, "b h t d -> b t (h d)"))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes `[b, t]` (any integer dtype) to logits `[b, t, 256]`; `t` may be any length.

    Weights are drawn from torch's global generator. Logits at position `i` depend on bytes
    `0..i` only. The blocks are a `ModuleList`, which is what fzero shards and gathers one at a
    time at stage 3.

    Example:
        >>> model = GPT(GPTConfig(layers=1, width=16, heads=2, context=8))
        >>> model(torch.zeros(3, 8, dtype=torch.uint8)).shape
        torch.Size([3, 8, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCAB, config.width)
        nn.init.normal_(self.embedding.weight, std=TABLE_STD)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the byte after each byte."""
        # The one table has two uses: the blocks want a stream of variance 1, the head small
        # logits, so that a new model does not insist on the byte that it has just read.
        x = self.embedding(tokens.long()) / TABLE_STD
        cos, sin = rotary(tokens.shape[-1], self.config.width // self.config.heads, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)


def rotary(length: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """`cos(i f_j), sin(i f_j)`, both `[length, head_width / 2]`, `f_j = 10000^(-2j/head_width)`.

    Source: Su et al., RoFormer, arXiv:2104.09864, section 3.2. The angles are float32 and the
    result has the dtype and device of `like`.
    """
    at = torch.arange(length, device=like.device, dtype=torch.float32)
    pairs = torch.arange(0, head_width, 2, device=like.device, dtype=torch.float32)
    angle = torch.outer(at, 10_000.0 ** (-pairs / head_width))
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features `(x_j, x_{j + d/2})` of `x: [..., t, d]` by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Tensor,
    *,
    count: int,
    context: int,
    seed: int = 0,
    ended: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Continue `prompt: [t]` by `count` bytes drawn from `softmax(logits / TEMPERATURE)`.

    Args:
        logits_of: `[1, t] -> [1, t, 256]`, for `t <= context`.
        prompt: uint8, at least one byte.
        count: bytes to draw.
        context: the model sees at most this many last bytes.
        seed: of the draws, which are made on the CPU so that every device draws alike.
        ended: asked before each byte; True ends it, with fewer bytes.

    Returns:
        The drawn bytes, `[count]` uint8, without the prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    text = prompt
    for _ in range(count):
        if ended():
            break
        logits = logits_of(text[None, -context:])[0, -1].float().cpu()
        drawn = torch.multinomial(F.softmax(logits / TEMPERATURE, -1), 1, generator=generator)
        text = torch.cat((text, drawn.to(text)))
    return text[prompt.numel() :]
