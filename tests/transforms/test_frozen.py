"""`frozen=codec`: training with an encoded base is training on the decoded one, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.errors import LayoutError
from fzero.machine.codecs import Codec, fp8, int8, nf4, powersgd
from fzero.state.layout import Leaf
from tests.live_bytes import LiveBytes
from tests.transforms.codecs_tried import Signs

WIDTH, LAYERS, VOCABULARY = 24, 3, 7


@dataclass(frozen=True)
class Own(Codec):
    """A user's: one table for all, on the CPU, and a value that is read: nothing for `meta`."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        top = x.abs().amax(-1, keepdim=True) + float(x.isnan().any())
        edges = torch.linspace(-1.0, 1.0, 255)
        return top.float(), torch.bucketize(x / (top + 1e-9), edges).to(torch.uint8)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return (parts[1].to(dtype) / 127 - 1) * parts[0].to(dtype)

    def wire_bytes(self, numel: int) -> int:
        return 4 + numel

    def bound(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True).expand_as(x) / 60


CODECS = (nf4(block=10, double=False), int8(), fp8(), fzero.codecs.bf16(), Signs(), Own())


def base(*, zeros: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A frozen embedding, tied to the head; layers with adapters; and odd leaves."""
    draw = torch.Generator().manual_seed(0)

    def leaf(*shape: int, learns: bool = False) -> Tensor:
        values = torch.zeros(shape) if zeros else torch.randn(shape, generator=draw) / 4
        return nn.Parameter(values if learns else values.to(dtype), requires_grad=learns)

    embedding = leaf(VOCABULARY, WIDTH)
    layers = [
        {
            "w": leaf(WIDTH, WIDTH),
            "bias": leaf(WIDTH),
            "down": leaf(WIDTH, 2, learns=True),
            "up": leaf(2, WIDTH, learns=True),
        }
        for _ in range(LAYERS)
    ]
    odd = {"scale": leaf(), "empty": leaf(0, 3), "index": torch.arange(6).view(2, 3)}
    return {"embedding": embedding, "layers": layers, **odd, "head": embedding}


def loss(params: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, params["embedding"]) * (1 + params["scale"])
    for one in params["layers"]:
        more = x.float() @ one["down"] @ one["up"]
        x = torch.tanh(F.linear(x.to(one["w"].dtype), one["w"], one["bias"]) + more)
    return F.cross_entropy(
        F.linear(x.to(params["head"].dtype), params["head"]).float().flatten(0, -2), ids.flatten()
    )


def step_fn(state: Any, ids: Tensor) -> Any:
    state, value = fzero.grad_and_reduce(loss, state)(ids)
    return fzero.apply_gradients(state), value


def decoded(codec: Codec, params: dict[str, Any]) -> dict[str, Any]:
    """The base with the values that are left of the matrices that do not learn."""

    def of(p: Any) -> Any:
        if p.requires_grad or not p.is_floating_point() or p.ndim < 2 or not p.numel():
            return p
        row = p.detach().float().reshape(1, -1)
        values = codec.decode(codec.encode(row), row.shape[1], torch.float32)
        return nn.Parameter(values.view_as(p).to(p.dtype), requires_grad=False)

    made = {k: of(p) for k, p in params.items() if k != "layers"}
    made["layers"] = [{k: of(p) for k, p in one.items()} for one in params["layers"]]
    return {**made, "head": made["embedding"]}


def stepper(world_size: int, stage: int, **options: Any) -> Any:
    return fzero.simulate(fzero.shard(step_fn, stage=stage, **options), world_size=world_size)


def trained(
    params: dict[str, Any], world_size: int, stage: int, updates: int = 2, **options: Any
) -> tuple[Any, Tensor]:
    step = stepper(world_size, stage, **options)
    state, draw = step.init(params, fzero.optim.adamw(1e-2)), torch.Generator().manual_seed(1)
    values = []
    for _ in range(updates):
        ids = torch.randint(0, VOCABULARY, (world_size, 2, 5), generator=draw)
        state, value = step(state, ids)
        values.append(value)
    return state, torch.stack(values)


def params_of(state: Any) -> dict[str, Tensor]:
    return fzero.checkpoint.state_dict(state)


def require_equal(first: Any, second: Any) -> None:
    ours, theirs = params_of(first), params_of(second)
    assert ours.keys() == theirs.keys()
    for path, x in ours.items():
        assert torch.equal(x, theirs[path]), path


def leaves_of(state: Any) -> dict[str, Leaf]:
    return {leaf.path: leaf for leaf in state.setup.layout.leaves}


@pytest.mark.parametrize(
    ("stage", "codec"),
    [*((stage, nf4()) for stage in range(4)), *((n % 2 * 3, one) for n, one in enumerate(CODECS))],
    ids=str,
)
def test_training_is_that_on_the_decoded_base(stage: int, codec: Codec) -> None:
    for world_size in (1, 3) if codec == nf4() else (2,):
        state, values = trained(base(), world_size, stage, frozen=codec)
        plain, wanted = trained(decoded(codec, base()), world_size, stage)
        assert torch.equal(values, wanted), world_size
        require_equal(state, plain)


@pytest.mark.parametrize("stage", [2, 3])
def test_of_16_bits_under_autocast_and_on_replicas_of_shards(stage: int) -> None:
    def lower(step: Any) -> Any:
        return fzero.autocast(step, dtype=torch.bfloat16)

    for params in (base(dtype=torch.bfloat16), base()):
        found = []
        for given, codec in ((params, nf4()), (decoded(nf4(), params), None)):
            wrapped = step_fn if given["scale"].dtype is torch.bfloat16 else lower(step_fn)
            sharded = fzero.shard(wrapped, stage=stage, frozen=codec, mesh=(2, 2))
            step: Any = fzero.simulate(sharded, world_size=4)
            state = step.init(given, fzero.optim.adamw(1e-2))
            state, values = step(state, torch.arange(20).view(4, 1, 5) % VOCABULARY)
            found.append((state, values))
        assert torch.equal(found[0][1], found[1][1])
        require_equal(found[0][0], found[1][0])


def test_matrices_are_encoded_once_and_all_else_stays() -> None:
    state = fzero.init(base(), fzero.optim.sgd(0.1), stage=2, frozen=int8())
    codecs = {path: leaf.codec for path, leaf in leaves_of(state).items()}
    kept = int8(memory=False)  # what is stored once has no memory
    matrices = {"embedding", "empty", *(f"layers.{i}.w" for i in range(LAYERS))}
    assert {path for path, codec in codecs.items() if codec is not None} == matrices
    assert {codecs[path] for path in matrices} == {kept}
    assert "head" not in codecs  # it is the embedding
    whole = fzero.full_params(state)
    assert whole["head"] is whole["embedding"] and not whole["head"].requires_grad
    assert whole["empty"].shape == (0, 3) and torch.equal(whole["index"], base()["index"])
    assert torch.equal(whole["layers"][0]["bias"], base()["layers"][0]["bias"])


def test_a_function_says_by_which_codec_each_leaf_is_stored() -> None:
    seen: dict[str, Any] = {}

    def which(path: str, leaf: Tensor) -> Codec | None:
        seen[path] = tuple(leaf.shape)
        return {"scale": fp8(), "layers.1.w": nf4(), "layers.1.bias": int8()}.get(path)

    state, values = trained(base(), 2, 3, 1, frozen=which)
    assert seen["scale"] == () and seen["layers.0.w"] == (WIDTH, WIDTH)
    assert "index" not in seen and "layers.0.up" not in seen  # which learns
    encoded = {path: leaf.codec for path, leaf in leaves_of(state).items() if leaf.codec}
    assert [*encoded] == ["layers.1.w", "layers.1.bias", "scale"]
    assert values.isfinite().all()


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 2), (2, 4), (3, 1), (3, 2), (3, 4)])
def test_bytes_that_are_held_and_sent(stage: int, world_size: int) -> None:
    params = base()
    step = stepper(world_size, stage, frozen=nf4())
    state = step.init(params, fzero.optim.adamw(1e-2))
    frozen = [
        flat
        for flat, group in zip(state.params.flats, state.setup.layout.groups, strict=True)
        if group.encoded
    ]
    ranks = world_size if stage == 3 else 1
    numels = [params["embedding"].numel(), *[WIDTH * WIDTH] * LAYERS]
    encoded = sum(map(nf4().wire_bytes, numels))
    held = sum(flat.untyped_storage().nbytes() for flat in frozen) / world_size
    padding = 16 * (len(numels) * (1 + ranks))
    assert encoded / ranks <= held <= (encoded + padding) / ranks
    assert {flat.dtype for flat in frozen} == {torch.uint8}
    with fzero.count_collectives() as log:
        state, _ = step(state, torch.zeros(world_size, 2, 5, dtype=torch.long))
    sent = [event for event in log.of() if event.dtype is torch.uint8]
    if ranks == 1:
        assert not sent
        return
    named = [path for event in sent for path in event.paths]
    # Each layer in the forward and in the backward, but for the one that stays; once the embedding.
    assert 2 * LAYERS <= len([path for path in named if path.endswith("w")]) <= 2 * LAYERS + 1
    share = (ranks - 1) / ranks
    for event in sent:
        numel = sum(
            leaf.form.nbytes
            for path, leaf in leaves_of(state).items()
            if path in event.paths and leaf.form is not None
        )
        assert numel * share <= event.wire_bytes <= (numel + 32 * ranks) * share


@pytest.mark.parametrize("stage", range(4))
def test_no_decoded_weight_outlives_the_kernel_that_reads_it(stage: int) -> None:
    width, layers, rows = 256, 6, 2
    one = width * width * 4
    draw = torch.Generator().manual_seed(0)
    params = {
        f"{i}": {
            "w": nn.Parameter(torch.randn(width, width, generator=draw), requires_grad=False),
            "up": torch.zeros(2, width),
        }
        for i in range(layers)
    }
    between = list[int]()

    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p.values():
            x = torch.tanh(x @ layer["w"] + x[:, :2] @ layer["up"])
        between.append(live.alive())
        return x.sum()

    state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage, frozen=nf4())
    live = LiveBytes()
    with live:
        before = live.alive()
        live.begin()
        state, _ = fzero.grad_and_reduce(loss, state)(torch.ones(rows, width))
    activations = layers * rows * width * 4 * 8
    assert between[0] - before <= activations < one / 2  # after the forward, before the backward
    assert live.peak - before <= 4 * one  # decoding one leaf, not `layers` of them


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_has_the_bytes_at_any_stage_on_any_ranks(stage: int, tmp_path: Path) -> None:
    state, _ = trained(base(), 2, stage, 1, frozen=nf4())
    fzero.checkpoint.save(tmp_path / "c", state)
    for world_size, other in ((1, 0), (3, 3), (2, 1)):
        blank = stepper(world_size, other, frozen=nf4())
        like = blank.init(base(zeros=True), fzero.optim.adamw(1e-2))
        loaded = fzero.checkpoint.load(tmp_path / "c", like)
        require_equal(loaded, state)
        moved = fzero.reshard(state, stage=other) if world_size == 2 else loaded
        require_equal(moved, state)
        assert leaves_of(moved) == leaves_of(state)


def test_a_checkpoint_of_another_codec_is_refused_and_decoded_files_go_anywhere(
    tmp_path: Path,
) -> None:
    state, _ = trained(base(), 2, 3, frozen=nf4())
    fzero.checkpoint.save(tmp_path / "c", state)
    fzero.checkpoint.export_safetensors(tmp_path / "e", state)
    for codec in (None, int8()):
        like = stepper(1, 2, frozen=codec).init(base(zeros=True), fzero.optim.adamw(1e-2))
        with pytest.raises(LayoutError, match=r"embedding: .* frozen as nf4[\s\S]*frozen="):
            fzero.checkpoint.load(tmp_path / "c", like)
        found = fzero.checkpoint.import_safetensors(tmp_path / "e", like)
        if codec is None:
            require_equal(found, state)
    like = stepper(2, 1, frozen=nf4()).init(base(zeros=True), fzero.optim.adamw(1e-2))
    require_equal(fzero.checkpoint.import_safetensors(tmp_path / "e", like), state)


def test_second_order_and_evaluation() -> None:
    def second(params: Any, codec: Codec | None) -> Tensor:
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=3, frozen=codec)
        weight = torch.tensor(2.0, requires_grad=True)
        new, _ = fzero.grad_and_reduce(lambda p, w: loss(p, torch.arange(5)) * w**2, state)(weight)
        found = [x for x in fzero.gradients(new)["layers"][0].values() if x is not None]
        norms = torch.stack([x.square().sum() for x in found])
        (by_weight,) = torch.autograd.grad(norms.sum(), weight)
        again = fzero.evaluate(loss, new)(torch.arange(5))
        return torch.stack([by_weight, again])

    assert torch.equal(second(base(), nf4()), second(decoded(nf4(), base()), None))


def test_what_is_no_codec_is_refused() -> None:
    def make(frozen: Any) -> Any:
        return fzero.init(base(), fzero.optim.sgd(0.1), stage=3, frozen=frozen)

    for frozen in (nf4, "nf4"):
        with pytest.raises(LayoutError, match="frozen="):
            make(frozen)
    with pytest.raises(LayoutError, match="full rank"):
        make(powersgd(rank=2))
    with pytest.raises(LayoutError, match="embedding: frozen="):
        make(lambda path, leaf: "nf4")


@dataclass(frozen=True)
class ByChance(Own):
    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        top, steps = super().encode(x)
        return top, steps - ((steps > 99) & (torch.rand_like(x) < 0.5)).to(torch.uint8)


@dataclass(frozen=True)
class OneScale(Own):
    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        top, steps = super().encode(x.reshape(1, -1))
        return top.expand(len(x), 1).contiguous(), steps.view_as(x)

    def bound(self, x: Tensor) -> Tensor:
        return x.abs().amax().expand_as(x) / 60


class Counts(Own):
    calls = 0

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        Counts.calls += 1
        return super().decode(parts, numel, dtype) * (1 + Counts.calls / 2**20)


@pytest.mark.parametrize(
    "codec", [ByChance(), OneScale(), Counts()], ids=lambda x: type(x).__name__
)
def test_a_codec_with_other_bytes_each_time_is_refused(codec: Codec) -> None:
    with pytest.raises(LayoutError, match="to other bytes by itself, or the next time"):
        fzero.init(base(), fzero.optim.sgd(0.1), stage=0, frozen=codec)


def test_a_loss_that_writes_to_an_encoded_leaf_is_refused() -> None:
    state = fzero.init(base(), fzero.optim.sgd(0.1), stage=0, frozen=nf4())
    with pytest.raises(LayoutError, match=r"embedding.*stored encoded"):
        fzero.grad_and_reduce(lambda p: p["embedding"].zero_().sum(), state)()


def test_loading_takes_one_whole_leaf_at_a_time() -> None:
    width, layers = 128, 8
    one = width * width * 4
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    module.requires_grad_(False)
    params = {"base": dict(module.named_parameters()), "scale": torch.ones(())}
    encoded = nf4().wire_bytes(width * width)

    def values(path: str, leaf: Tensor) -> Tensor:
        return torch.ones(leaf.shape) if "weight" in path else torch.ones(())

    live = LiveBytes()
    with live:
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=2, frozen=nf4(), initializer=values)
        assert live.peak <= layers * encoded + 4 * one  # the leaf, and what encodes it
    assert fzero.full_params(state)["base"]["3.weight"].eq(1.0).all()


def test_a_mirror_carries_the_bytes(tmp_path: Path) -> None:
    def blank() -> Any:
        step = fzero.shard(step_fn, stage=3, frozen=nf4())
        return step, step.init(base(), fzero.optim.adamw(1e-2))

    step, state = blank()
    after, _ = step(state, torch.arange(5))
    with fzero.checkpoint.Mirror(tmp_path, every=1) as mirror:
        mirror.update(after)
        restored, _ = mirror.restore(blank()[1])
    require_equal(restored, after)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plan_counts_the_bytes_that_ranks_hold(stage: int) -> None:
    module = nn.Sequential(nn.Linear(40, 40).requires_grad_(False), nn.Linear(40, 3))
    apply, params = fzero.functionalize(module)

    def step_fn(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(lambda p: apply(p, x).sum(), state)()
        return fzero.apply_gradients(state), value

    step: Any = fzero.simulate(fzero.shard(step_fn, stage=stage, frozen=nf4()), world_size=4)
    state = step.init(params, fzero.optim.adamw(1e-3))
    plan = fzero.plan(module, torch.ones(2, 40), world=4, stage=stage, frozen=nf4())
    assert plan.bytes["parameters"] == sum(flat.nbytes for flat in state.params.flats) / 4
