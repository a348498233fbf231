"""fzero on "sim": the bits of the CPU, no order that is luck, no wait that is not listed.

`CASES` is a table of what is trained: by both drivers, at all stages, on two rank processes and on
two virtual ranks of one process, on the CPU and on "sim" under the checker.
"""

from __future__ import annotations

import gc
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from tests.covering import Axes
from tests.device import on_sim
from tests.device.order import Order, checked
from tests.drivers import each_rank
from tests.failing import fails_in_backward
from tests.gpu import training
from tests.gpu.bodies import STAGES
from tests.gpu.costs import allocated
from tests.gpu.training import LR, Net, make_batch

STEPS = 3
AXES = Axes(("name", "stage", "driver"))
INT8 = fzero.codecs.int8(block=32)
Found = dict[str, Tensor]


class Case(NamedTuple):
    """What is trained, and how: `options` are an engine's, and of a step the transforms."""

    options: Mapping[str, Any] = MappingProxyType({})
    rule: Callable[..., Any] = partial(fzero.optim.adamw, LR, weight_decay=1e-2)
    stages: Sequence[int] = STAGES
    dtype: torch.dtype = torch.float32
    checkpoint: str = "none"  # or "reentrant", "nonreentrant" (torch's), "remat" (fzero's)
    backwards: int = 1  # more than one: in a window
    frozen: str = ""  # the names that do not learn begin so
    event: Callable[[Any, int, Path], Found] = lambda run, number, folder: {}  # after a step
    donate: bool = True
    virtual: bool = True  # it is run on virtual ranks, too
    waits: tuple[str, ...] = ()  # in which functions of fzero the host may wait


class ByEngine:
    """The case with `loss.backward()` and `engine.step()`."""

    def __init__(self, case: Case, stage: int, device: str, rank: int, folder: Path) -> None:
        self.case, self.device, self.rank = case, device, rank
        self.engine = self.state = Engine(
            _model(case, device), case.rule(), stage=stage, **_options(case, folder)
        )

    def step(self, batches: Sequence[Tensor], fail: bool = False) -> None:
        with self.engine.coalesce() if len(batches) > 1 else nullcontext():
            for batch in batches:
                loss = self.engine.scale(training.loss_of(self.engine, batch))
                self.engine.backward(fails_in_backward(loss, ZeroDivisionError) if fail else loss)
        self.engine.step()

    def drop(self) -> None:
        self.engine.zero_grad()

    def evaluate(self, symbols: Tensor) -> Tensor:
        with torch.no_grad():
            return self.engine(symbols)

    def reshard(self, stage: int) -> None:
        self.engine.reshard(stage)

    def end(self) -> Found:
        found = training.on_cpu(self.engine.full_state_dict())
        self.engine.close()
        closed = training.on_cpu(self.engine.module.state_dict())
        return found | {f"closed.{path}": value for path, value in closed.items()}


class ByStep:
    """The case with a functional step."""

    def __init__(self, case: Case, stage: int, device: str, rank: int, folder: Path) -> None:
        self.case, self.device, self.rank = case, device, rank
        self.apply, params = fzero.functionalize(_model(case, device))
        self.fails, self.options = False, _options(case, folder)
        self.make(stage)
        self.state = self.train_step.init(params, case.rule())

    def make(self, stage: int) -> None:
        options = dict(self.options)
        step: Any = fzero.coalesce(self.step_fn) if self.case.backwards > 1 else self.step_fn
        for name, transform in TRANSFORMS.items():
            if name in options:
                step = transform(step, options.pop(name))
        learns = lambda path: not self.case.frozen or not path.startswith(self.case.frozen)  # noqa: E731
        self.train_step = fzero.shard(
            step, stage=stage, donate=self.case.donate, trainable=learns, **options
        )

    def step_fn(self, state: Any, batches: Sequence[Tensor]) -> Any:
        for batch in batches:
            state, _ = fzero.grad_and_reduce(self.loss, state)(batch)
        return fzero.apply_gradients(state), None

    def loss(self, params: Any, batch: Tensor) -> Tensor:
        loss = training.loss_of(lambda symbols: self.apply(params, symbols), batch)
        return fails_in_backward(loss, ZeroDivisionError) if self.fails else loss

    def step(self, batches: Sequence[Tensor], fail: bool = False) -> None:
        self.fails = fail
        try:
            self.state, _ = self.train_step(self.state, batches)
        finally:
            self.fails = False

    def drop(self) -> None:
        pass

    def evaluate(self, symbols: Tensor) -> Tensor:
        return fzero.evaluate(self.apply, self.state)(symbols)

    def reshard(self, stage: int) -> None:
        self.state = fzero.reshard(self.state, stage)
        self.make(stage)

    def end(self) -> Found:
        return training.on_cpu(fzero.full_params(self.state))


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "max_norm": lambda step, norm: fzero.clip(step, max_norm=norm),
    "autocast": lambda step, dtype: fzero.autocast(step, dtype=dtype),
    "loss_scale": fzero.scale_loss,
    "compress": lambda step, c: fzero.compress(
        step, gradients=c.gradients, parameters=c.parameters
    ),
    "offload": lambda step, o: fzero.offload(step, **o.homes, folder=o.folder),
    "local": lambda step, o: fzero.local(
        step, every=o.every, fragments=o.fragments, delay=o.delay, mixing=o.mixing
    ),
    "check_finite": lambda step, on: fzero.check_finite(step) if on else step,
}
DRIVERS = {"engine": ByEngine, "step": ByStep}


def _model(case: Case, device: str) -> nn.Module:
    torch.manual_seed(3)
    model = Net(case.checkpoint).to(device, case.dtype)
    for path, p in model.named_parameters():
        p.requires_grad_(not case.frozen or not path.startswith(case.frozen))
    return model


def _options(case: Case, folder: Path) -> dict[str, Any]:
    homes = case.options.get("offload")
    if homes is None:
        return {**case.options}
    return {**case.options, "offload": fzero.Offload(**homes, folder=folder)}


# What happens between two steps.


def evaluates(run: Any, number: int, folder: Path) -> Found:
    symbols = make_batch(run.device, step=90 + number, at=0, rank=run.rank)[0]
    return {f"evaluated {number}": run.evaluate(symbols).cpu()}


def fails(run: Any, number: int, folder: Path) -> Found:
    if number:
        return {}
    batches = _batches(run, 50)
    with pytest.raises((ZeroDivisionError, fzero.FzeroError)):
        run.step(batches, fail=run.rank == 1)
    run.drop()
    return {}


def reshards(run: Any, number: int, folder: Path) -> Found:
    if number < 2:
        run.reshard(3 - 2 * number)
    return {}


def saves(run: Any, number: int, folder: Path) -> Found:
    if number == 0:
        run.saving = fzero.checkpoint.save_async(folder / "saved", run.state, rng=False)
    if number == 1:
        run.saving.result()
        fresh = type(run)(run.case, 0, run.device, run.rank, folder)
        fresh.state = fzero.checkpoint.load(folder / "saved", fresh.state)
        return {f"saved.{path}": value for path, value in fresh.end().items()}
    return {}


def mirrors(run: Any, number: int, folder: Path) -> Found:
    if number == 0:
        run.mirror = fzero.checkpoint.Mirror(folder / "mirror", every=2)
    run.mirror.update(run.state)
    if number == STEPS - 1:
        run.mirror.close()
    return {}


def _muon() -> Any:
    rules = {"matrices": fzero.optim.muon(LR), "rest": fzero.optim.adamw(LR)}
    return fzero.optim.partition(rules, lambda x: ("rest", "matrices")[len(x.shape) == 2])


OFF = {"optimizer": "cpu", "gradients": "cpu"}
DISK = {"optimizer": "disk", "gradients": "disk"}
OF_FILES = ("to_device", "_filled")
BF16 = torch.bfloat16
CASES: dict[str, Case] = {
    "plain": Case(),
    "sgd": Case(rule=partial(fzero.optim.sgd, LR, momentum=0.5), options={"bucket_bytes": 2000}),
    "torch's rule": Case(
        rule=lambda: fzero.optim.from_torch(partial(torch.optim.AdamW, lr=LR)),
        options={"max_norm": 0.5},
    ),
    "window": Case(backwards=2, options={"max_norm": 0.5}),
    "no donation": Case(donate=False),
    "prefetch": Case(stages=[3], options={"prefetch_numel": 10_000}),
    "no prefetch": Case(stages=[3], options={"prefetch_numel": 0}),
    "no overlap": Case(options={"overlap": False}),
    "kept": Case(stages=[3], options={"reshard_after_forward": False}),
    "kept in a window": Case(stages=[3], backwards=2, options={"reshard_after_forward": "window"}),
    "persistent": Case(stages=[3], options={"persistence_threshold_numel": 40}),
    "local": Case(options={"local": fzero.Local(every=2)}),
    "local late": Case(
        options={"local": fzero.Local(every=2, fragments=2, delay=1, mixing=0.5)},
        waits=("_departed",),
    ),
    "local late, offload": Case(
        options={
            "local": fzero.Local(every=2, fragments=2, delay=1, mixing=0.5),
            "offload": OFF,
        },
        waits=("_departed",),
    ),
    "int8": Case(stages=[0, 1, 2], options={"compress": fzero.Compress(gradients=INT8)}),
    "int8 both ways": Case(
        stages=[3], options={"compress": fzero.Compress(gradients=INT8, parameters=INT8)}
    ),
    "powersgd": Case(options={"compress": fzero.Compress(gradients=fzero.codecs.powersgd(rank=1))}),
    "offload": Case(options={"offload": OFF}),
    "offload all": Case(stages=[3], backwards=2, options={"offload": OFF | {"params": "cpu"}}),
    "disk": Case(options={"offload": DISK, "max_norm": 0.5}, waits=OF_FILES),
    "disk all": Case(stages=[3], options={"offload": DISK | {"params": "disk"}}, waits=OF_FILES),
    "masters": Case(dtype=BF16, options={"max_norm": 0.5}),
    "offloaded masters": Case(dtype=BF16, options={"offload": OFF}),
    "muon": Case(rule=_muon),
    "offload, no donation": Case(options={"offload": OFF}, donate=False),
    "soap": Case(rule=partial(fzero.optim.soap, LR, refresh_every=2)),
    "adafactor": Case(rule=partial(fzero.optim.adafactor, LR), waits=("rule_step",)),
    "encoded base": Case(
        frozen="blocks.0", options={"frozen": fzero.codecs.nf4()}, checkpoint="nonreentrant"
    ),
    "encoded moments": Case(
        rule=partial(fzero.optim.adamw, LR, state_dtype=fzero.codecs.dynamic8(block=64))
    ),
    "remat": Case(checkpoint="remat"),
    "reentrant": Case(checkpoint="reentrant"),
    "nonreentrant": Case(checkpoint="nonreentrant"),
    "evaluate": Case(event=evaluates),
    "autocast": Case(options={"autocast": BF16}),
    "loss scale": Case(
        options={
            "autocast": torch.float16,
            "loss_scale": fzero.DynamicScale(init_scale=2.0**21, growth_interval=4),
            "max_norm": 1.0,
        }
    ),
    "mirror": Case(event=mirrors, virtual=False),
    "save_async": Case(event=saves, virtual=False),
    "reshard": Case(event=reshards, stages=[1], waits=("_since",)),
    "reshard, offload": Case(
        event=reshards, stages=[1], options={"offload": OFF}, waits=("_since",)
    ),
    "an exception": Case(event=fails, donate=False, virtual=False),
    "check_finite": Case(options={"check_finite": True}, waits=("taken",)),
}


def _batches(run: Any, number: int) -> list[Tensor]:
    return [
        make_batch(run.device, step=number, at=at, rank=run.rank)
        for at in range(run.case.backwards)
    ]


def trained(
    case: Case, stage: int, driver: str, device: str, rank: int, folder: Path, order: Order
) -> Found:
    """The parameters after some updates, and what the events of the case found."""
    found: Found = {}
    run = DRIVERS[driver](case, stage, device, rank, folder)
    batches = [_batches(run, number) for number in range(STEPS)]
    for number, some in enumerate(batches):
        meet()
        before = Counter(order.waits)
        run.step(some)
        if number == STEPS - 1:
            require_listed(order.waits - before, case.waits)
        meet()
        found |= case.event(run, number, folder)
    return found | run.end()


def meet() -> None:
    """Let all ranks be here: virtual ones share the order, with all that is noted in it."""
    fzero.psum(torch.zeros(()))


def require_listed(waits: Counter[tuple[str, str]], expected: Sequence[str]) -> None:
    """Assert that the host waited only where the case says, and docs/performance.md has why."""
    text = (Path(fzero.__file__).parent.parent / "docs" / "performance.md").read_text()
    listed = {*re.findall(r"`(fzero/\S+\.py)`, `(\w+)`", text)}
    for what, place in waits:
        found = re.match(r"(\S+):\d+ in (\w+)", place)
        assert found is not None, place
        assert found[2] in expected and found.groups() in listed, (what, place)


def compare(name: str, stage: int, driver: str, rank: int, order: Order) -> None:
    """Train on both devices."""
    with folder_of_ranks() as first, folder_of_ranks() as second:
        run = partial(trained, CASES[name], stage, driver)
        wanted = run("cpu", rank, first, order)
        found = run("sim", rank, second, order)
    training.check_close(found, wanted, error=0.0)


@contextmanager
def folder_of_ranks() -> Iterator[Path]:
    """A folder of all rank processes."""
    with tempfile.TemporaryDirectory() as own:
        all_of_them: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, own)
        yield Path(all_of_them[0])
        dist.all_reduce(torch.zeros(1))


def rows(virtual: bool) -> list[tuple[str, int, str]]:
    return [
        (name, stage, driver)
        for name, case in CASES.items()
        if case.virtual or not virtual
        for stage, driver in itertools.product(case.stages, DRIVERS)
    ]


@pytest.mark.parametrize(AXES, rows(virtual=False))
@on_sim(2)
def test_two_processes_have_the_bits_of_the_cpu(name: str, stage: int, driver: str) -> None:
    with checked() as order:
        compare(name, stage, driver, dist.get_rank(), order)
    order.require_none()


@pytest.mark.parametrize(AXES, rows(virtual=True))
@on_sim()
def test_two_virtual_ranks_have_the_bits_of_the_cpu(name: str, stage: int, driver: str) -> None:
    def body(rank: int) -> Tensor:
        compare(name, stage, driver, rank, order)
        return torch.zeros(())

    with checked() as order:
        each_rank(body, 2)
    order.require_none()


@pytest.mark.parametrize(
    ("name", "stage"),
    [*[("plain", k) for k in STAGES], ("no donation", 1), ("offload", 2), ("offload all", 3)],
)
@on_sim(2)
def test_the_peak_is_what_is_planned(name: str, stage: int) -> None:
    case, rank = CASES[name], dist.get_rank()
    with folder_of_ranks() as folder:
        batches = [make_batch("sim", step=0, at=at, rank=rank) for at in range(case.backwards)]
        before = allocated("sim")
        run = ByStep(case, stage, "sim", rank, folder)
        run.step(batches)
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        run.step(batches)
        peak = torch.accelerator.max_memory_allocated() - before
        params = fzero.functionalize(_model(case, "sim"))[1]
        plan = fzero.plan.of_step(
            run.train_step, params, case.rule(), batches, world=2, device="sim"
        )
    # A number that crossed the ranks goes when its collective is over, sooner or later.
    assert plan.peak_bytes is not None
    assert 0 <= plan.peak_bytes - peak <= 4
