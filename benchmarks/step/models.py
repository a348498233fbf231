"""The models of the benchmark and the batches they train on.

A model's `forward(x, y)` is its loss, a scalar, so that every wrapper (DDP, FSDP2, DeepSpeed's
engine, fzero's `functionalize`) is given the same module and called in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MLP_FEATURES = 1024
MLP_LAYERS = 8
MLP_SAMPLES = 16
SMALL_FEATURES = 64
GPT_FEATURES = 256
GPT_LAYERS = 6
GPT_HEADS = 4
GPT_TOKENS = 128
GPT_VOCABULARY = 8192

Batch = tuple[Tensor, Tensor]


class Mlp(nn.Module):
    """8 x (Linear(1024, 1024) without bias, gelu); 8,388,608 parameters (32 MiB in float32)."""

    def __init__(self) -> None:
        """Draw the weights from torch's default initialization."""
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(MLP_FEATURES, MLP_FEATURES, bias=False) for _ in range(MLP_LAYERS)
        )
        for block in self.blocks:
            nn.init.normal_(block.get_parameter("weight"), std=1.5 / MLP_FEATURES**0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [n, 1024] -> mean squared error, []."""
        for block in self.blocks:
            x = F.gelu(block(x))
        return F.mse_loss(x, y)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input; no biases but the norms'."""

    def __init__(self) -> None:
        """Draw the weights from torch's default initialization."""
        super().__init__()
        self.norm_1 = nn.LayerNorm(GPT_FEATURES)
        self.qkv = nn.Linear(GPT_FEATURES, 3 * GPT_FEATURES, bias=False)
        self.out = nn.Linear(GPT_FEATURES, GPT_FEATURES, bias=False)
        self.norm_2 = nn.LayerNorm(GPT_FEATURES)
        self.up = nn.Linear(GPT_FEATURES, 4 * GPT_FEATURES, bias=False)
        self.down = nn.Linear(4 * GPT_FEATURES, GPT_FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, t, d] -> [n, t, d], causal."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, GPT_HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """d = 256, 6 layers, 4 heads, 128 tokens, 8,192 tied symbols; 6,855,168 parameters."""

    def __init__(self) -> None:
        """Draw the weights; the tied embedding is small so that the first loss is ln(8192)."""
        super().__init__()
        self.symbols = nn.Embedding(GPT_VOCABULARY, GPT_FEATURES)
        self.places = nn.Embedding(GPT_TOKENS, GPT_FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(GPT_LAYERS))
        self.norm = nn.LayerNorm(GPT_FEATURES)
        nn.init.normal_(self.symbols.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [n, t] symbols and their successors -> mean cross-entropy in nats, []."""
        h = self.symbols(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.symbols.weight)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Small(nn.Module):
    """8 x (Linear(64, 64), gelu); 33,280 parameters: what a step costs beside its arithmetic."""

    def __init__(self) -> None:
        """Draw the weights from torch's default initialization."""
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(SMALL_FEATURES, SMALL_FEATURES) for _ in range(MLP_LAYERS)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [n, 64] -> mean squared error, []."""
        for block in self.blocks:
            x = F.gelu(block(x))
        return F.mse_loss(x, y)


def _small_batch(generator: torch.Generator) -> Batch:
    x = torch.randn(MLP_SAMPLES, SMALL_FEATURES, generator=generator)
    return x, x.roll(1, dims=-1).relu()


def _mlp_batch(generator: torch.Generator) -> Batch:
    x = torch.randn(MLP_SAMPLES, MLP_FEATURES, generator=generator)
    return x, x.roll(1, dims=-1).relu()


def _gpt_batch(generator: torch.Generator) -> Batch:
    # Few of the symbols, each followed by its successor: something that can be learnt.
    start = torch.randint(64, (1, 1), generator=generator)
    symbols = (start + torch.arange(GPT_TOKENS + 1)) % 64
    return symbols[:, :-1], symbols[:, 1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, its data and the number of backward calls in one optimizer step."""

    name: str
    make_module: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    backwards: int

    def module(self) -> nn.Module:
        """A new module; the same weights at every call and on every rank."""
        torch.manual_seed(0)
        return self.make_module()

    def batches(self, *, step: int, rank: int) -> list[Batch]:
        """The `backwards` batches of one rank and step; no two ranks or steps share one."""
        generator = torch.Generator().manual_seed(step * 1009 + rank)
        return [self.make_batch(generator) for _ in range(self.backwards)]


def make_task(name: str, *, backwards: int) -> Task:
    """The task of that name.

    Args:
        name: "mlp", "gpt" or "small".
        backwards: backward calls in one optimizer step, 1 or more.

    Raises:
        ValueError: another name, or no backward call.
    """
    if backwards < 1:
        raise ValueError(f"backwards is {backwards}; an optimizer step needs 1 or more")
    if name == "mlp":
        return Task(name=name, make_module=Mlp, make_batch=_mlp_batch, backwards=backwards)
    if name == "gpt":
        return Task(name=name, make_module=Gpt, make_batch=_gpt_batch, backwards=backwards)
    if name == "small":
        return Task(name=name, make_module=Small, make_batch=_small_batch, backwards=backwards)
    raise ValueError(f"no model is called {name!r}.\nFix: use mlp, gpt or small.")
