"""`Engine(..., frozen=codec)`: an encoded base under hooks, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, gathered
from fzero.errors import LayoutError, PhaseError
from fzero.machine.codecs import Codec, nf4
from tests.drivers import each_rank

WIDTH, VOCABULARY = 16, 10
WEIGHT = "1.base.weight"


class Adapted(nn.Module):
    """A frozen linear layer and norm, and two small matrices that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(WIDTH, 2) / 8)
        self.up = nn.Parameter(torch.randn(2, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.base(x) + x @ self.down @ self.up))


def model(codec: Codec | None = None) -> nn.Sequential:
    """A model with a tied head; with the values that a codec leaves of its frozen matrices."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    made = nn.Sequential(embedding.requires_grad_(False), Adapted(), Adapted(), head)
    head.weight = embedding.weight
    for p in made.parameters() if codec is not None else ():
        if not p.requires_grad and p.ndim > 1 and codec is not None:
            row = p.detach().reshape(1, -1)
            p.data = codec.decode(codec.encode(row), p.numel(), torch.float32).view_as(p)
    return made


def engine_of(module: nn.Module, stage: int, codec: Codec | None, **options: Any) -> Engine:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2)

    return Engine(module, make, stage=stage, frozen=codec, **options)


def update(engine: Engine, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (2, 5), generator=draw)
    engine.backward(F.cross_entropy(engine(ids).flatten(0, 1), ids.flatten()))
    engine.step()


def values(engine: Engine) -> dict[str, Tensor]:
    return {path: p.detach() for path, p in fzero.full_params(engine.state).items()}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_an_engine_trains_as_on_the_decoded_base(stage: int, world_size: int) -> None:
    def run(given: Codec | None, frozen: Codec | None) -> Any:
        def body(rank: int) -> Any:
            engine = engine_of(model(given), stage, frozen)
            for t in range(2):
                update(engine, 10 * t + rank)
            found = values(engine)
            engine.close()
            after = dict(engine.module.named_parameters())
            for path, p in after.items():
                assert type(p.data) is Tensor and torch.equal(p.detach(), found[path])
            return found

        return each_rank(body, world_size)

    ours, theirs = run(None, nf4()), run(nf4(), None)
    assert ours.keys() == theirs.keys()
    for path, x in ours.items():
        assert torch.equal(x, theirs[path]), path


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_written_between_steps_is_encoded(stage: int) -> None:
    def body(rank: int) -> Tensor:
        module = model()
        engine = engine_of(module, stage, nf4())
        update(engine, rank)
        saved = {path: x * 2 for path, x in values(engine).items() if path == WEIGHT}
        module.load_state_dict(saved, strict=False)
        update(engine, rank)
        assert torch.allclose(values(engine)[WEIGHT], saved[WEIGHT])  # 2 times each scale
        with pytest.raises(LayoutError, match=r"a part or a view of .*1\.base\.weight"):
            module.get_parameter(WEIGHT).data[0].zero_()
        return values(engine)[WEIGHT]

    each_rank(body, 2)


def test_a_write_on_some_ranks_is_heard_at_the_next_update() -> None:
    def body(rank: int) -> None:
        module = model()
        engine = engine_of(module, 1, nf4())
        with torch.no_grad():
            module.get_parameter(WEIGHT).fill_(rank)
        update(engine, 0)

    with pytest.raises(Exception, match=WEIGHT):
        each_rank(body, 2)


@pytest.mark.parametrize("stage", range(4))
def test_a_block_that_modifies_encodes_what_one_rank_wrote(stage: int) -> None:
    def body(rank: int) -> Tensor:
        module = model()
        engine = engine_of(module, stage, nf4())
        before = values(engine)
        with gathered(module, modify=True, from_rank=1):
            module.get_parameter(WEIGHT).copy_(torch.full((WIDTH, WIDTH), rank + 1.0))
        named = dict(module.named_parameters())
        with gathered([named["2.base.weight"]], modify=True) as (whole,):
            whole.fill_(rank + 3.0)
        with pytest.raises(PhaseError, match="without modify"), gathered(module) as full:
            full[0].zero_()
        after = values(engine)
        for path in before.keys() - {WEIGHT, "2.base.weight"}:
            assert torch.equal(before[path], after[path]), path
        update(engine, rank)
        return torch.stack([after[WEIGHT].unique(), after["2.base.weight"].unique()])

    assert each_rank(body, 2).tolist() == [[[2.0], [3.0]]] * 2


def test_a_forward_that_writes_to_the_base_is_refused() -> None:
    module = model()
    engine = engine_of(module, 0, nf4())

    def write(*_: Any) -> None:
        with torch.no_grad():
            module.get_parameter(WEIGHT).mul_(2.0)

    module.register_forward_pre_hook(write)
    with pytest.raises(PhaseError, match=r"the forward wrote to 1\.base\.weight"):
        engine(torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize("stage", range(4))
def test_an_engine_goes_on_at_another_stage_and_from_a_checkpoint(
    stage: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("c")

    def run(*, moves: bool) -> dict[str, Tensor]:
        engine = engine_of(model(), stage, nf4())
        update(engine, 0)
        if moves:
            fzero.checkpoint.save(folder, engine)
            engine.close()
            engine = engine_of(model(), 3 - stage, nf4())
            fzero.checkpoint.load(folder, engine)
            engine.reshard(stage=(stage + 1) % 4)
        update(engine, 1)
        return values(engine)

    moved, stayed = run(moves=True), run(moves=False)
    for path, x in moved.items():
        assert torch.equal(x, stayed[path]), path


def test_a_compiled_forward_reads_decoded_weights() -> None:
    def run(*, compiled: bool) -> dict[str, Tensor]:
        module = model()
        engine = engine_of(module, 2, nf4())
        if compiled:
            module.compile(backend="aot_eager")
        for t in range(2):
            update(engine, t)
        return values(engine)

    ours, theirs = run(compiled=True), run(compiled=False)
    for path, x in ours.items():
        assert torch.allclose(x, theirs[path], atol=1e-6), path


def test_a_module_on_the_meta_device_is_loaded_leaf_by_leaf() -> None:
    given = model(nf4())
    whole = dict(given.named_parameters(remove_duplicate=False))
    numel = sum(p.numel() for p in given.parameters())

    def made(path: str, leaf: Tensor) -> Tensor:
        assert leaf.is_meta
        return whole[path].detach().clone()

    for stage in (0, 3):
        with torch.device("meta"):
            module = model()
        engine = engine_of(module, stage, nf4(), initializer=made)
        for path, x in values(engine).items():
            assert torch.equal(x, whole[path]), path
        assert sum(flat.nbytes for flat in engine.state.params.flats) < numel * 4
        update(engine, 0)
        plain = engine_of(model(nf4()), stage, None)
        update(plain, 0)
        for path, x in values(engine).items():
            assert torch.equal(x, values(plain)[path]), path


def test_a_module_on_the_meta_device_without_values_is_refused() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(LayoutError, match="initializer="):
        engine_of(module, 0, None)
    with pytest.raises(LayoutError, match=r"the buffer 1\.running_mean is on the meta device"):
        engine_of(module, 0, None, initializer=lambda path, leaf: torch.ones(leaf.shape))


def test_whole_values_by_path_are_decoded_and_pieces_are_refused() -> None:
    engine = engine_of(model(), 2, nf4())
    found = values(engine)[WEIGHT]
    assert torch.equal(engine.full_parameter(WEIGHT), found)
    assert torch.equal(engine.full_parameters()[WEIGHT], found)
    assert torch.equal(engine.full_state_dict()[WEIGHT], found)
    assert type(engine.state_dict()[WEIGHT]) is Tensor  # a copy, which can be saved
    engine.set_full_parameter(WEIGHT, torch.ones(WIDTH, WIDTH))
    assert values(engine)[WEIGHT].eq(1.0).all()
    with pytest.raises(LayoutError, match="a piece of it has no values"):
        engine.local_parameter(WEIGHT)
