"""States that are kept encoded: what an update makes of them, and what becomes of their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import Mirror, load, load_universal, save, save_universal
from fzero.checkpoint.elements import slots_of
from fzero.errors import LayoutError, PhaseError
from fzero.optim import Encoding, adamw, from_torch
from fzero.optim import encoded_moments as encoded
from fzero.ranks.virtual import run_ranks
from tests.live_bytes import LiveBytes

codecs = fzero.codecs
SHAPES = {"w": (37, 48), "b": (45,), "e": (130, 64), "s": (), "none": (0,), "v": (200,)}
LR = 1e-2


@dataclass(frozen=True)
class Halves(codecs.Codec):
    """A user's codec without a bound: encoded again, what was decoded has other bytes."""

    block: int = 48

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        scale = 1.01 * x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        return scale, (x / scale).half()

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return (parts[1].to(dtype) * parts[0].to(dtype))[..., :numel]


@dataclass(frozen=True)
class Roots(Halves):
    """Halves of what is never negative."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().encode(x.abs())


CODECS = {
    "int8": codecs.int8(block=128),
    "dynamic8": codecs.dynamic8(),
    "by chance": codecs.dynamic8(stochastic=True),
    "a user's": Halves(),
}


def values(seed: int) -> dict[str, Tensor]:
    """Whole numbers, so that sums over ranks are exact."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(x, generator=generator) * 2 ** (torch.arange(x[-1] if x else 1) % 7))
        .round()
        .reshape(x)
        for name, x in SHAPES.items()
    }


def train(state: Any, number: Tensor) -> tuple[Any, Tensor]:
    grads = values(int(number) + 1)

    def loss(p: Any) -> Tensor:
        return torch.stack([(p[name] * g).sum() for name, g in grads.items()]).sum()

    state, out = fzero.grad_and_reduce(loss, state)()
    return fzero.apply_gradients(state), out


def step_of(stage: int, ranks: int, **options: Any) -> Any:
    step = fzero.shard(train, stage=stage, **options)
    return fzero.simulate(step, world_size=ranks) if ranks else step


def advanced(step: Any, state: Any, numbers: range, ranks: int) -> Any:
    for k in numbers:
        state, _ = step(state, torch.full((ranks,), k) if ranks else torch.tensor(k))
    return state


def contents(state: Any, ranks: int) -> dict[str, Tensor]:
    """Parameters and decoded slots, whole."""

    def read(state: Any) -> dict[str, Tensor]:
        slots = fzero.slots(state, "optimizer")
        found = {f"{slot}.{k}": x for slot, some in slots.items() for k, x in some.items()}
        return {**fzero.full_params(state), **found}

    if not ranks:
        return read(state)
    return {k: x[0] for k, x in fzero.simulate(read, world_size=ranks)(state).items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]), name


def rule(codec: Any, **options: Any) -> Any:
    return adamw(LR, state_dtype=Encoding(codec, smallest=150), **options)


def plain(codec: Any, updates: int) -> dict[str, Tensor]:
    """The same by torch's AdamW on decoded states, leaf by leaf, in whole blocks."""
    params, found = values(0), dict[str, Tensor]()
    block = Encoding(codec).block
    of_slot = {"exp_avg": codec, "exp_avg_sq": codec.of_squares()}
    for name, p in params.items():
        flat, numel = F.pad(p.reshape(-1), (0, -p.numel() % block)), p.numel()
        state = {slot: torch.zeros_like(flat) for slot in of_slot}
        for k in range(updates):
            param = nn.Parameter(flat)
            param.grad = F.pad(values(k + 1)[name].reshape(-1), (0, flat.numel() - numel))
            adam = torch.optim.AdamW([param], LR, fused=True)
            adam.state[param] = {"step": torch.tensor(float(k)), **state}
            adam.step()
            flat = param.detach()
            for slot, one in of_slot.items() if numel >= 150 else ():
                rows = state[slot].view(-1, one.block)
                parts = one.at(k).encode(rows)
                state[slot] = one.decode(parts, one.block, torch.float32).reshape(-1)
        found[name] = flat[:numel].view(p.shape)
        found |= {f"{slot}.{name}": x[:numel].view(p.shape) for slot, x in state.items()}
    return found


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_an_update_is_that_of_the_decoded_states(
    codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded, "PIECE_OF_CPU", 1024)  # several pieces a leaf
    expected = plain(codec, 3)
    for stage, ranks in ((0, 0), (3, 3)):
        step = step_of(stage, ranks)
        state = advanced(step, step.init(values(0), rule(codec)), range(3), ranks)
        same(contents(state, ranks), expected)


def test_torch_has_the_same_bits_by_its_class() -> None:
    step, expected = step_of(2, 2), plain(CODECS["dynamic8"], 3)
    low = Encoding(codecs.dynamic8(), smallest=150)
    ours = from_torch(partial(torch.optim.AdamW, lr=LR), state_dtype=low)
    same(contents(advanced(step, step.init(values(0), ours), range(3), 2), 2), expected)


# Bytes.


def rows_of(state: Any) -> dict[str, Tensor]:
    return {f"{x.name} {x.group}": x.flat for x in slots_of(state) if x.codec is not None}


def test_two_bytes_a_parameter_and_a_plan_counts_them() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 2))
    numel = sum(p.numel() for p in model.parameters())
    ours, x = adamw(1e-3, state_dtype=codecs.int8()), torch.zeros(1, 8, dtype=torch.long)
    _, params = fzero.functionalize(model)
    state = fzero.init(params, ours, stage=0)
    held = [x for some in state.optimizer.moments for x in some]
    counted = sum(x.untyped_storage().nbytes() for x in held)
    assert counted + 8 == fzero.state_bytes(state)["optimizer"]  # and the count of updates
    assert 2.0 < counted / numel < 2.1
    for world, stage in ((1, 0), (2, 2), (3, 3)):
        plan = fzero.plan(model, x, optimizer=ours, stage=stage, world=world, device="cpu")
        init = partial(fzero.init, params, ours, stage=stage)
        made = run_ranks(lambda _, init=init: fzero.state_bytes(init()), world)
        for kind in ("parameters", "optimizer"):
            assert [one[kind] for one in made] == [plan.bytes[kind]] * world


def test_an_update_needs_little_memory_beside_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded, "PIECE_OF_CPU", 2**16)
    numel = 2**20
    ours = adamw(1e-3, state_dtype=codecs.dynamic8())
    state = fzero.init({"w": torch.ones(numel)}, ours, stage=0)
    update = partial(ours.advance, state.params.flats, [torch.ones(numel)], state.optimizer, ())
    update(owned=True)  # makes tables
    with LiveBytes() as live:
        update(owned=True)
    assert live.peak < 16 * 4 * 2**16 < 2 * 4 * numel  # both moments in fp32


MOVES = [(1, 2, 3, 3), (3, 3, 2, 1), (0, 1, 2, 4)]


@pytest.mark.parametrize("codec", [Halves(), codecs.dynamic8(stochastic=True)], ids=str)
@pytest.mark.parametrize(("stage", "ranks", "to", "others"), MOVES)
def test_bytes_are_carried_as_they_are(
    codec: Any, stage: int, ranks: int, to: int, others: int, tmp_path: Path
) -> None:
    step, there = step_of(stage, ranks), step_of(to, others)
    state = advanced(step, step.init(values(0), rule(codec)), range(2), ranks)
    wanted = contents(state, ranks)
    moved = fzero.reshard(state, stage=to, mesh=(1, others))
    save(tmp_path, state)
    loaded = load(tmp_path, there.init(values(9), rule(codec)))
    going = contents(advanced(step, state, range(2, 4), ranks), ranks)
    for again in (moved, loaded):
        same(contents(again, others), wanted)
        same(contents(advanced(there, again, range(2, 4), others), others), going)


def test_a_mirror_has_them(tmp_path: Path) -> None:
    step = step_of(0, 0)
    state = advanced(step, step.init(values(0), rule(Halves())), range(2), 0)
    Mirror(tmp_path, every=1).update(state)
    again, _ = Mirror(tmp_path, every=1).restore(step_of(3, 0).init(values(5), rule(Halves())))
    same(contents(again, 0), contents(state, 0))
    same(rows_of(again), rows_of(state))


def test_universal_checkpoints_have_numbers(tmp_path: Path) -> None:
    step = step_of(2, 2)
    state = advanced(step, step.init(values(0), rule(codecs.dynamic8())), range(2), 2)
    wanted = contents(state, 2)
    save_universal(tmp_path, state)
    for other in (rule(codecs.dynamic8()), adamw(LR)):
        again = load_universal(tmp_path, step_of(3, 3).init(values(4), other))
        same(contents(again, 3), wanted)


def test_other_codecs_are_refused_by_name(tmp_path: Path) -> None:
    step = step_of(0, 0)
    save(tmp_path, step.init(values(0), rule(Halves())))
    with pytest.raises(LayoutError, match=r"slot exp_avg of e.*Halves.*torch.float32"):
        load(tmp_path, step.init(values(0), adamw(LR)))


def test_a_recording_is_made_again_at_other_ranks() -> None:
    step = fzero.record(step_of(2, 2), every=2)
    state = advanced(step, step.init(values(0), rule(codecs.int8())), range(5), 2)
    replayed = fzero.replay(step.recording, step=5)
    assert replayed.same
    same(contents(replayed.after, 2), contents(state, 2))


# What goes with it.


def test_an_overflow_leaves_the_bytes_as_they_are() -> None:
    for ours in (rule(Halves()), from_torch(torch.optim.Adam, state_dtype=Encoding(Halves(), 150))):
        state = fzero.init({k: v for k, v in values(0).items() if k != "none"}, ours, stage=0)

        @fzero.scale_loss(scale=2.0)
        def step(state: Any, factor: float) -> Any:
            loss = lambda p: (p["w"].square().sum() + p["v"].sum()) * factor  # noqa: E731
            state, _ = fzero.grad_and_reduce(loss, state)()
            return fzero.apply_gradients(state), None

        before, _ = step(state, 1.0)
        after, _ = step(before, float("inf"))
        same(rows_of(after), rows_of(before))
        same(fzero.full_params(after), fzero.full_params(before))
        again, _ = step(after, 1.0)
        assert not all(torch.equal(x, rows_of(after)[k]) for k, x in rows_of(again).items())


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_offload_and_donation_change_no_bit(home: Any, tmp_path: Path) -> None:
    offload = fzero.Offload(optimizer=home, folder=tmp_path if home == "disk" else None)
    step = step_of(2, 0, donate=True)
    state = step.init(values(0), rule(Halves()), offload=offload)
    same(contents(advanced(step, state, range(3), 0), 0), plain(Halves(), 3))


def test_bf16_parameters_with_masters_and_without() -> None:
    for masters in (True, False):
        given = {k: v.bfloat16() for k, v in values(0).items()}
        step = step_of(1, 2)
        ours = rule(codecs.dynamic8(), master_weights=masters)
        state = advanced(step, step.init(given, ours), range(2), 2)
        one = advanced(step_of(0, 0), step_of(0, 0).init(given, ours), range(2), 0)
        same(contents(state, 2), contents(one, 0))


def test_logical_ranks_and_local_updates() -> None:
    made = [
        contents(
            advanced(
                step := step_of(stage, ranks),
                step.init(values(0), rule(codecs.dynamic8()), logical_ranks=4),
                range(2),
                ranks,
            ),
            ranks,
        )
        for stage, ranks in ((0, 1), (2, 3), (3, 4))
    ]
    for one in made[1:]:
        same(one, made[0])
    step = fzero.simulate(fzero.shard(fzero.local(train, every=2), stage=2), world_size=2)
    state = step.init(values(0), rule(codecs.dynamic8()))
    for k in range(4):
        state, _ = step(state, torch.full((2,), k))
    assert all(x.isfinite().all() for x in contents(state, 2).values())
    with pytest.raises(LayoutError, match="a codec as state_dtype"):
        fzero.init(values(0), adamw(LR), stage=0, local=fzero.Local(every=2, outer=rule(Halves())))


# Engines.


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64), nn.Linear(64, 2))


def trained(engine: Engine, steps: int = 3) -> dict[str, Tensor]:
    for k in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(k))
        engine(x).square().mean().backward()
        engine.step()
    found = engine.full_optimizer_states()
    more = {f"{slot}.{k}": x for k, some in found.items() for slot, x in some.items()}
    return {**engine.full_parameters(), **{k: torch.as_tensor(x) for k, x in more.items()}}


def test_engines_ask_for_it_by_the_rule_or_by_an_option() -> None:
    low = codecs.dynamic8()
    first = trained(Engine(module(), adamw(LR, state_dtype=low), stage=3))
    net = module()
    engine = Engine(net, torch.optim.AdamW(net.parameters(), LR), stage=2, state_dtype=low)
    same(trained(engine), first)
    other = torch.randn(80, 64)
    engine.set_full_optimizer_state("0.weight", "exp_avg", other)
    got = engine.full_optimizer_state("0.weight", "exp_avg")
    assert torch.equal(
        got, low.decode(low.encode(other.view(-1)), 5120, torch.float32).view(80, 64)
    )
    same(
        {"x": engine.full_optimizer_state("2.weight", "exp_avg")}, {"x": first["exp_avg.2.weight"]}
    )
    optimizer = engine.optimizer
    engine.close()
    own = optimizer.state[dict(net.named_parameters())["2.weight"]]["exp_avg"]
    assert torch.equal(own, first["exp_avg.2.weight"])
    again = Engine(net, optimizer, stage=0, state_dtype=low)  # it goes on from what it has
    assert torch.equal(again.full_optimizer_state("2.weight", "exp_avg"), own)


def test_a_leaf_without_a_gradient_keeps_its_bytes() -> None:
    net = module()
    low = Encoding({"exp_avg": Halves(), "exp_avg_sq": codecs.dynamic8(stochastic=True)})
    engine = Engine(net, torch.optim.AdamW(net.parameters(), LR), stage=1, state_dtype=low)
    trained(engine, 2)
    before = {k: x.clone() for k, x in rows_of(engine.state).items()}
    net[2](torch.ones(3, 80)).sum().backward()
    engine.step()
    after = rows_of(engine.state)
    changed = {k for k, x in after.items() if not torch.equal(x, before[k])}
    assert len(after) == 4 and len(changed) == 2


# What is refused.


def any_dtype(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class ByChance(Halves):
    """It draws."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().encode(x + torch.rand_like(x) / 64)


@dataclass(frozen=True)
class OneScale(Halves):
    """One scale of all blocks."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        largest = x.abs().max().clamp(min=1e-30)
        return largest.expand(*x.shape[:-1], 1).contiguous(), (x / largest).half()


@dataclass(frozen=True)
class OfNoZeros(Halves):
    """It divides by the largest."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        largest = x.abs().amax(-1, keepdim=True)
        return largest, (x / largest).half()


def refusals() -> Iterator[tuple[str, Any, type, str]]:
    small = {"w": torch.ones(80, 80)}
    yield "no blocks", lambda: adamw(LR, state_dtype=codecs.bf16()), LayoutError, "no `block`"
    yield (
        "no codec",
        lambda: adamw(LR, state_dtype=any_dtype({"exp_avg": 8})),
        LayoutError,
        "exp_avg",
    )
    yield (
        "a word",
        lambda: adamw(LR, state_dtype=any_dtype("int8")),
        LayoutError,
        "state_dtype='int8'",
    )
    for low, wrong in (
        (ByChance(), "the next time"),
        (OneScale(), "by itself"),
        (OfNoZeros(), "NaN"),
    ):
        name = type(low).__name__
        yield name, lambda low=low: adamw(LR, state_dtype=low), LayoutError, f"{name}.*{wrong}"
    doubles = {"w": torch.ones(80, 80, dtype=torch.float64)}
    yield "fp64", lambda: fzero.init(doubles, rule(Halves()), stage=0), LayoutError, "float64"
    whole = from_torch(torch.optim.Adafactor, state_dtype=codecs.int8())
    yield "matrices", lambda: fzero.init(small, whole, stage=0), LayoutError, "whole parameters"
    told = from_torch(torch.optim.SGD, needs="matrix", state_dtype=codecs.int8())
    yield "needs", lambda: fzero.init(small, told, stage=0), LayoutError, "whole parameters"

    unsigned = codecs.dynamic8(signed=False)
    torchs = partial(torch.optim.AdamW, amsgrad=True)
    by_rule = {
        "adamw": lambda low: adamw(LR, state_dtype=low),
        "from_torch": lambda low: fzero.init(small, from_torch(torchs, state_dtype=low), stage=2),
        "an engine": lambda low: Engine(
            nn.Linear(8, 8), torch.optim.AdamW, stage=2, state_dtype=low
        ),
    }
    for name, call in by_rule.items():
        for low in (unsigned, Encoding(unsigned, 1), {"exp_avg": Roots()}):
            lost = partial(call, low)
            yield f"{name}: {low}", lost, LayoutError, "exp_avg of .* keeps no negative numbers"
        for slot in ("exp_avgs", "momentum_buffer", "masters", "step"):
            what = rf"state_dtype\['{slot}'\]: .* keeps no state of that name[\s\S]*'exp_avg_sq'"
            yield f"{name}: {slot}", partial(call, {slot: codecs.int8()}), LayoutError, what
    what = "momentum_buffer'\\]: sgd keeps no state of that name"
    one = {"momentum_buffer": codecs.int8()}
    yield "no momentum", lambda: fzero.optim.sgd(LR, state_dtype=one), LayoutError, what
    yield "nothing", lambda: adamw(LR, state_dtype={}), LayoutError, "state_dtype={}"

    def meta() -> Any:
        state = fzero.init(small, rule(Halves()), stage=0)

        def outer(x: Tensor) -> Tensor:
            loss = lambda p: (p["w"] * x).sum()  # noqa: E731
            after = fzero.apply_gradients(fzero.grad_and_reduce(loss, state)()[0])
            return fzero.full_params(after)["w"].sum()

        return torch.func.grad(outer)(torch.tensor(1.0))

    yield "a derivative", meta, PhaseError, "encoded states was to be differentiated"


@pytest.mark.parametrize(
    ("call", "kind", "match"), [x[1:] for x in refusals()], ids=[x[0] for x in refusals()]
)
def test_what_cannot_be_is_refused(call: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        call()


def test_a_codec_by_name_for_what_is_never_negative_is_taken() -> None:
    some = {"exp_avg_sq": codecs.dynamic8(signed=False)}
    for rule in (adamw(LR, state_dtype=some), from_torch(torch.optim.AdamW, state_dtype=some)):
        state = fzero.init({"w": torch.ones(80, 80)}, rule, stage=2)
        state, _ = fzero.grad_and_reduce(lambda p: -p["w"].sum(), state)()
        held = fzero.slots(fzero.apply_gradients(state), "optimizer")
        assert held["exp_avg"]["w"].lt(0).all() and held["exp_avg_sq"]["w"].gt(0).all()


@dataclass(frozen=True)
class Even(Halves):
    """Levels that are evenly spaced."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        scale, halves = super().encode(x)
        return scale, (halves * 127).round().to(torch.int8)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return super().decode((parts[0], parts[1].to(dtype) / 127), numel, dtype)


@pytest.mark.parametrize("codec", [Even(), {"exp_avg_sq": codecs.int8()}], ids=["one", "by name"])
def test_even_levels_of_squares_are_warned_of(codec: Any) -> None:
    with pytest.warns(UserWarning, match="is kept as 0"):
        fzero.init({"w": torch.ones(80, 80)}, adamw(LR, state_dtype=codec), stage=0)
    fzero.init({"w": torch.ones(80, 80)}, fzero.optim.lion(LR, state_dtype=Even()), stage=0)


# Peers, and training.


def test_bitsandbytes_takes_the_same_way() -> None:
    """Its tolerance is its distance to fp32, which is larger: it keeps small squares as 0."""
    optimizers = pytest.importorskip("bitsandbytes.optim")
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (64, 70), "v": (4097,)}
    first = {k: 0.1 * torch.randn(x, generator=generator) for k, x in shapes.items()}
    theirs, wide = ([nn.Parameter(x.clone()) for x in first.values()] for _ in range(2))
    peers = optimizers.AdamW8bit(theirs, 1e-3), torch.optim.AdamW(wide, 1e-3)
    state = fzero.init(first, adamw(1e-3, state_dtype=codecs.dynamic8()), stage=0)
    for _ in range(4):
        sizes = {k: torch.randn(x, generator=generator).exp() for k, x in shapes.items()}
        grads = {k: 1e-3 * x * torch.randn(x.shape, generator=generator) for k, x in sizes.items()}
        for group in (theirs, wide):
            for p, g in zip(group, grads.values(), strict=True):
                p.grad = g.clone()
        for peer in peers:
            peer.step()
        state, _ = fzero.grad_and_reduce(
            lambda p, grads=grads: sum((p[k] * g).sum() for k, g in grads.items()), state
        )()
        state = fzero.apply_gradients(state)
    for ours, their, exact in zip(fzero.full_params(state).values(), theirs, wide, strict=True):
        moved = (exact - ours).abs().mean(), (exact - their).abs().mean()
        assert moved[0] <= 1.05 * moved[1]
        assert (ours - their).abs().mean() < 0.01 * 1e-3 * 4  # 1 % of the way


def test_training_goes_as_in_fp32() -> None:
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).mul(2).softmax(-1)

    def batch(seed: int, size: int = 64) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(0, 64, (size,), generator=generator)
        return x, table[x].multinomial(1, generator=generator)[:, 0]

    def final(state_dtype: Any) -> float:
        torch.manual_seed(0)
        apply, params = fzero.functionalize(
            nn.Sequential(nn.Embedding(64, 64), nn.GELU(), nn.Linear(64, 64))
        )
        state = fzero.init(params, adamw(1e-2, state_dtype=state_dtype), stage=0)

        def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(apply(p, x), y)

        for k in range(80):
            state, _ = fzero.grad_and_reduce(loss, state)(*batch(k))
            state = fzero.apply_gradients(state)
        return float(loss(fzero.full_params(state), *batch(1000, 4096)))

    wide, even = final(None), codecs.int8()
    for low in (even, codecs.dynamic8(), codecs.dynamic8(stochastic=True)):
        assert abs(final(low) / wide - 1) < 0.01
    with pytest.warns(UserWarning, match="is kept as 0"):
        assert not abs(final({"exp_avg": even, "exp_avg_sq": even}) / wide - 1) < 0.01
