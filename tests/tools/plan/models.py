"""Models that are planned and run, and how each cell is run for real."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.tools.plan import Plan


class Block(nn.Module):
    """Attention with fewer heads for keys than for queries, and an MLP with a gate."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, *, remat: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size, self.remat = heads, kv_heads, dim // heads, remat
        self.before, self.between = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.remat:
            return self.computed(x)
        out: Any = checkpoint(self.computed, x, use_reentrant=False)
        return out

    def computed(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.before(x)
        query = self.query(y).view(b, t, self.heads, self.size).transpose(1, 2)
        key, value = (
            made(y).view(b, t, self.kv_heads, self.size).transpose(1, 2)
            for made in (self.key, self.value)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A decoder as Llama's, without positions."""

    def __init__(
        self,
        *,
        layers: int = 2,
        dim: int = 64,
        heads: int = 4,
        kv_heads: int = 2,
        hidden: int = 160,
        vocabulary: int = 203,
        remat: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(
            Block(dim, heads, kv_heads, hidden, remat=remat) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token(model: Any, tokens: Tensor) -> Tensor:
    """The loss of a decoder."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


class Encoder(nn.Module):
    """Attention by torch's own layer, under a causal mask that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(40))

    def forward(self, x: Tensor) -> Tensor:
        mask: Any = self.mask
        return self.layer(x, src_mask=mask[: x.shape[1], : x.shape[1]])


def mlp() -> nn.Module:
    """Uneven sizes, a tied weight, a frozen one and a scalar that nothing uses."""
    made = nn.Sequential(
        nn.Linear(50, 37), nn.Tanh(), nn.Linear(37, 37), nn.GELU(), nn.Linear(37, 37)
    )
    made[4].weight = made[2].weight
    made[0].bias.requires_grad_(False)
    made.register_parameter("scalar", nn.Parameter(torch.ones(())))
    return made


def square(model: Any, x: Tensor) -> Tensor:
    """The loss of an MLP."""
    return model(x).float().pow(2).mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the options of one step, planned or run."""

    model: str = "mlp"  # or "decoder", "remat", "encoder"
    stage: int = 3
    mesh: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float32
    torch_optimizer: bool = False
    shard: dict[str, Any] = field(default_factory=dict)  # options of fzero.shard
    around: dict[str, Any] = field(default_factory=dict)  # options of fzero.plan for transforms

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        made = {"mlp": mlp, "encoder": Encoder}.get(self.model)
        made = Decoder(remat=self.model == "remat") if made is None else made()
        return made.to(self.dtype)

    def loss(self) -> Any:
        return square if self.model in ("mlp", "encoder") else next_token

    def batch(self) -> Tensor:
        if self.model == "mlp":
            return torch.ones(8, 50, dtype=self.dtype)
        if self.model == "encoder":
            return torch.ones(4, 33, 32)
        return torch.arange(4 * 48).view(4, 48) % 203

    def optimizer(self) -> Any:
        if not self.torch_optimizer:
            return fzero.optim.adamw(1e-3)
        return fzero.optim.from_torch(lambda params: torch.optim.AdamW(params, lr=1e-3))

    def plan(self, world: int, **options: Any) -> Plan:
        return fzero.plan(
            self.module(),
            self.batch(),
            world=self.mesh or world,
            stage=self.stage,
            optimizer=self.optimizer(),
            loss=self.loss(),
            **{**self.shard, **self.around, **options},
        )

    def step(self, seen: Any) -> tuple[Any, Any]:
        """A step that is written as users do, and its parameters; `seen` is given each state."""
        apply, params = fzero.functionalize(self.module())

        def loss_fn(params: Any, batch: Tensor) -> Tensor:
            return self.loss()(lambda x: apply(params, x), batch)

        def step_fn(state: Any, batch: Tensor) -> tuple[Any, Tensor]:
            state, loss = fzero.grad_and_reduce(loss_fn, state)(batch)
            seen(state)
            return fzero.apply_gradients(state), loss

        given = self.around
        step: Any = fzero.accumulate(step_fn, steps=given.get("micro_batches", 1))
        step = fzero.coalesce(step) if "coalesced" in given else step
        step = fzero.clip(step, max_norm=given.get("max_norm"))
        step = fzero.autocast(step, dtype=given["autocast"]) if "autocast" in given else step
        if "offload" in given:
            step = fzero.offload(step, **given["offload"].homes)
        if "compress" in given:
            kinds = given["compress"]
            step = fzero.compress(step, gradients=kinds.gradients, parameters=kinds.parameters)
        options: dict[str, Any] = {} if self.mesh is None else {"mesh": self.mesh}
        return fzero.shard(step, stage=self.stage, **options, **self.shard), params
