"""The simulated device itself: its numbers are the CPU's, and torch knows it as an accelerator."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fzero.tools.doctor import environment, environment_text
from tests.device import on_sim
from tests.device.order import checked


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten())
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x.view(-1, 1, 8, 8)), 0.1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embed(x.view(-1, 16).abs().mul(3).long() % 11)).mean(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3)),
    "convolutions": Convolutions,
    "attention": Attention,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=0.01),
}


def train(device: str, model: str, optimizer: str, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    net = MODELS[model]()
    batches = [torch.randn(6, 64) for _ in range(steps)]
    net = net.to(device)
    step = OPTIMIZERS[optimizer](net.parameters())
    torch.manual_seed(2)
    losses = []
    for x in batches:
        loss = net(x.to(device)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        step.step()
        step.zero_grad()
        losses.append(loss.detach())
    return [x.cpu() for x in (*losses, *net.state_dict().values())]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_sim()
def test_training_has_the_bits_of_the_cpu(model: str, optimizer: str) -> None:
    with checked() as order:
        got = train("sim", model, optimizer)
    order.require_none()
    for a, b in zip(got, train("cpu", model, optimizer), strict=True):
        assert torch.equal(a, b)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(8, 6, 2), nn.GRU(6, 6, bidirectional=True)])
        self.cell = nn.RNNCell(12, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        for layer in self.layers:
            packed, _ = layer(packed)
        h = self.cell(packed.data)
        targets = torch.ones(3, 2, dtype=torch.long, device=x.device)
        loss: Any = F.ctc_loss  # which takes numbers, too
        return loss(h[:12].view(4, 3, 5).log_softmax(2), targets, (4, 4, 4), (2, 2, 2))


@on_sim()
def test_recurrent_layers_and_losses_of_sequences_have_the_cpus_numbers() -> None:
    """Not its bits: of a cell torch asks every device but the CPU for one kernel."""

    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        net, x = Recurrent().double(), torch.randn(5, 3, 8, dtype=torch.float64)
        net.to(device)(x.to(device), torch.tensor([4, 5, 3])).backward()
        return [p.grad.cpu() for p in net.parameters() if p.grad is not None]

    with checked() as order:
        got = trained("sim")
    order.require_none()
    torch.testing.assert_close(got, trained("cpu"))


@pytest.mark.parametrize("use_reentrant", [True, False])
@on_sim()
def test_torchs_checkpoints_repeat_random_numbers(use_reentrant: bool) -> None:
    def gradient(device: str) -> Tensor:
        torch.manual_seed(1)
        layer, x = nn.Linear(8, 8), torch.randn(4, 8)
        layer, x = layer.to(device), x.to(device).requires_grad_()
        torch.manual_seed(2)
        body = nn.Sequential(layer, nn.Dropout(0.5), layer)
        checkpoint(body, x, use_reentrant=use_reentrant).square().sum().backward()
        return layer.weight.grad.cpu()

    assert torch.equal(gradient("sim"), gradient("cpu"))


@on_sim()
def test_whole_numbers_are_counted() -> None:
    """As a mixture of experts does, but on the CPU, which has no kernel for it."""
    experts = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device="sim")
    assert experts.histc(4, 0, 3).cpu().tolist() == [1, 2, 0, 1]


@on_sim()
def test_torch_knows_it_as_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == torch.sim.device_count() == 2
    assert torch.get_device_module("sim") is torch.sim
    assert torch.ones(1, device="sim").device == torch.device("sim:0")
    with torch.device("sim:1"):
        assert torch.zeros(2).device == torch.device("sim:1")
    with torch.sim.device(1):
        assert torch.ones(1, device="sim").device.index == torch.sim.current_device() == 1
        assert torch.sim.current_stream().device.index == 1
    assert torch.sim.current_stream() == torch.sim.default_stream()
    x = torch.ones(2, device="sim")
    assert x.is_sim and x.cpu().sim().is_sim and not x.is_cpu
    with pytest.raises(TypeError, match="sim"):
        x.numpy()
    found = environment()["gpus"]
    assert [one["name"] for one in found] == ["sim:0", "sim:1"]
    assert "sim:1" in environment_text({"gpus": found})


@on_sim()
def test_tensors_of_two_devices_do_not_meet() -> None:
    x = torch.ones(3, device="sim")
    for other in (torch.ones(3), torch.ones(3, device="sim:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x.add(other)
    assert (x + torch.tensor(2.0)).sum().item() == 9.0  # a number of the host is none


@on_sim()
def test_random_numbers_are_those_of_its_generators() -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device="sim").cpu(), want)
    assert torch.equal(torch.rand(4, device="sim:1").cpu(), want)  # each device has its own
    generator = torch.Generator("sim").manual_seed(3)
    assert generator.device == torch.device("sim:0")
    assert torch.equal(torch.rand(4, device="sim", generator=generator).cpu(), want)
    state = torch.sim.get_rng_state()
    x = torch.randn(4, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="sim"), x)
    torch.manual_seed(3)
    torch.rand(4, device="sim")
    assert torch.equal(torch.rand(4), want)  # the host's is another
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.rand(2, device="sim")


@on_sim()
def test_memory_is_counted_to_the_byte() -> None:
    before = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    x = torch.empty(1000, device="sim")
    y = torch.empty(500, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_allocated() - before == 4500
    del x
    assert torch.sim.memory_allocated() - before == 500
    assert torch.sim.max_memory_allocated() - before == 4500
    y.untyped_storage().resize_(0)
    assert torch.sim.memory_allocated() == before


@on_sim()
def test_views_share_memory_and_storages_can_be_set() -> None:
    x = torch.arange(12.0, device="sim")
    x.view(3, 4).t()[1:, ::2].mul_(0)
    assert x.cpu().tolist() == [0.0 if i % 4 and i // 4 != 1 else i for i in range(12)]
    assert x.unfold(0, 4, 4)[1].data_ptr() == x[4:].data_ptr()
    y = torch.empty(0, device="sim").set_(x.untyped_storage(), 2, (2, 3), (3, 1))
    assert torch.equal(y, x[2:8].view(2, 3))
    assert x.view(torch.int32).data_ptr() == x.data_ptr()
    assert torch.empty(0, device="sim").resize_(3, 2).numel() == 6
    out = torch.empty(0, device="sim")
    torch.cat([x, x], out=out)
    assert torch.equal(out, x.repeat(2))


@on_sim()
def test_pinned_memory_is_of_the_host() -> None:
    x = torch.ones(4).pin_memory()
    assert x.is_pinned() and x.is_cpu and not torch.ones(4).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()


def test_without_a_compiler_a_test_is_skipped_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.skip.Exception, match=r"needs a C\+\+ compiler, and there is none"):
        test_pinned_memory_is_of_the_host()


@on_sim()
def test_autocast_and_a_scaled_loss() -> None:
    net = nn.Linear(8, 8).to("sim")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=8.0)
    with torch.autocast("sim", torch.bfloat16):
        y = net(torch.ones(2, 8, device="sim"))
        assert y.dtype == torch.bfloat16
        assert F.softmax(y, -1).dtype == torch.float32
    scaler.scale(y.float().sum()).backward()
    before = net.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, net.weight)


@on_sim()
def test_saved_and_loaded() -> None:
    buffer = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device="sim:1")}, buffer)
    for where in (None, "cpu", "sim:0"):
        buffer.seek(0)
        x = torch.load(buffer, map_location=where)["x"]
        assert x.device == torch.device(where or "sim:1") and x.sum().item() == 3.0


WAITS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "item": (lambda x: x.sum().item(), 1),
    "nonzero": (lambda x: x.nonzero(), 1),
    "a mask": (lambda x: x[x > 0], 1),
    "a number of the host": (lambda x: x.add_(torch.tensor(1.0)), 0),
    "cpu": (lambda x: x.cpu(), 1),
    "from the host": (lambda x: x.copy_(torch.ones(4)), 1),
    "synchronize": (lambda x: torch.sim.synchronize(), 1),
    "a stream": (lambda x: torch.sim.current_stream().synchronize(), 1),
    "a step": (lambda x: torch.optim.SGD([nn.Parameter(x)], lr=0.1).step(), 0),
    "equal": (lambda x: torch.equal(x, x), 1),
}


@pytest.mark.parametrize("what", WAITS)
@on_sim()
def test_waits_of_the_host_are_counted_by_place(what: str) -> None:
    call, count = WAITS[what]
    x = torch.ones(4, device="sim")
    with checked() as order:
        call(x)
    order.require_none()
    assert sum(order.waits.values()) == count
    assert all("test_device.py" in place for _, place in order.waits)
