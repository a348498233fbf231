"""Models of torch alone: convolutions, recurrence, attention, sums by chance, odd parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.family import Family

CLASSES, WIDTH, LENGTH, IDS = 3, 6, 5, 11


def _classified(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def _family(make: Callable[[], nn.Module], *shape: int, loss: Any = _classified) -> Family:
    """Of a model of floats [n, *shape] with scores of classes."""

    def batch(source: torch.Generator, count: int) -> Any:
        x = torch.randn(count, *shape, generator=source)
        return x, torch.randint(CLASSES, (count,), generator=source)

    return Family(make=make, loss=loss, batch=batch)


def _of_ids(make: Callable[[], nn.Module]) -> Family:
    def batch(source: torch.Generator, count: int) -> Any:
        ids = torch.randint(IDS, (count, LENGTH), generator=source)
        return ids, torch.randint(CLASSES, (count,), generator=source)

    return Family(make=make, loss=_classified, batch=batch)


def _mlp(activation: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(WIDTH, 9), activation(), nn.Linear(9, 9), activation(), nn.Linear(9, CLASSES)
    )


class Recurrent(nn.Module):
    """The last output of an LSTM or a GRU."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind(WIDTH, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][:, -1])


class Encoder(nn.Module):
    """Embeddings and layers of torch's transformer."""

    def __init__(self, dropout: float = 0.0, norm_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(IDS, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                8, 2, 12, dropout=dropout, batch_first=True, norm_first=norm_first
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    """Many normed layers beside one stream; a scalar gate for each."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.gates = nn.ParameterList(nn.Parameter(torch.tensor(0.5)) for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm, gate in zip(self.layers, self.norms, self.gates, strict=True):
            x = x + gate * torch.tanh(layer(norm(x)))
        return self.head(x)


class Mixture(nn.Module):
    """Experts that the data choose: some ranks do not use them all."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best, chosen = weights.max(-1)
        scores = torch.zeros(len(x), CLASSES, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                scores = scores.index_put((mine,), expert(x[mine]))
        return scores * best[:, None]


class Tied(nn.Module):
    """An autoencoder whose two halves share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH) / 2)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x @ self.weight.t() + self.bias) @ self.weight


class Bilinear(nn.Module):
    """An inner product of two projections, and a weight under weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(WIDTH, WIDTH, 5)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(5, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.pair(x, x.flip(-1))))


def _bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(IDS, 7), nn.PReLU(), nn.Linear(7, CLASSES))


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 2),
        nn.GELU(), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def _conv_1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 5, 3, padding=1, groups=1), nn.SiLU(), nn.ConvTranspose1d(5, 4, 2, 2),
        nn.InstanceNorm1d(4, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def _dropped() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, CLASSES), nn.Dropout(0.1)
    )


def _restored(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0])


def _cast(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).float(), y)


PLAIN = {
    "mlp": _family(_mlp(nn.Tanh), WIDTH),
    "mlp relu": _family(_mlp(nn.ReLU), WIDTH),
    "mlp cast": _family(_mlp(nn.GELU), WIDTH, loss=_cast),
    "conv": _family(_conv, 2, 8, 8),
    "conv 1d": _family(_conv_1d, 2, 8),
    "lstm": _family(lambda: Recurrent(nn.LSTM), LENGTH, WIDTH),
    "gru": _family(lambda: Recurrent(nn.GRU), LENGTH, WIDTH),
    "encoder": _of_ids(Encoder),
    "encoder pre-norm": _of_ids(lambda: Encoder(norm_first=True)),
    "encoder dropout": _of_ids(lambda: Encoder(dropout=0.2)),
    "dropout": _family(_dropped, WIDTH),
    "residual": _family(Residual, WIDTH),
    "mixture": _family(Mixture, WIDTH),
    "tied": _family(Tied, WIDTH, loss=_restored),
    "bilinear": _family(Bilinear, WIDTH),
    "bag": _of_ids(_bag),
}
