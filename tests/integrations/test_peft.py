"""Adapters of PEFT: as states over one base, in PEFT's files, and under a trainer."""

from __future__ import annotations

import copy
import doctest
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.adapter import Engine
from fzero.errors import CheckpointError, LayoutError
from tests.adapter.on_ranks import on_ranks
from tests.integrations.launched import launched
from tests.test_examples_small import run

TIER_INPUTS = ("fzero/integrations",)  # tests/tiers.py: a push that changes them runs these tests

peft: Any = pytest.importorskip("peft", exc_type=ImportError)
transformers: Any = pytest.importorskip("transformers", exc_type=ImportError)
module: Any = importlib.import_module("fzero.integrations.peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # of what the libraries warn

EXAMPLES = Path(__file__).parents[2] / "examples"
IDS = torch.arange(12).view(2, 6)
QV = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
LORA: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "target_modules": "all-linear", "lora_alpha": 3},
    "dora": {**QV, "use_dora": True},
    "ranks": {**QV, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 5}},
    "head": {**QV, "modules_to_save": ["lm_head"]},
    "embedding": {**QV, "target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {**QV, "trainable_token_indices": [3, 4]},
    "bias": {**QV, "bias": "lora_only"},
}


def config_of(kind: str) -> Any:
    if kind == "ia3":
        return peft.IA3Config(target_modules=["q_proj", "v_proj"], feedforward_modules=[])
    return peft.LoraConfig(**LORA[kind], task_type="CAUSAL_LM")


def llama(tied: bool = False, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(
        **sizes, tie_word_embeddings=tied, attention_bias=True, **more
    )
    return transformers.LlamaForCausalLM(config).double()


def moved(params: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """As if they had been trained: what is zero at first is not any more."""
    torch.manual_seed(seed)
    return {path: x + torch.randn_like(x) / 5 for path, x in params.items()}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def read(model: Any, folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), str(folder))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [*LORA, "ia3"])
def test_an_adapter_is_that_of_peft_there_and_back(kind: str, tied: bool, tmp_path: Path) -> None:
    model = llama(tied)
    before, _ = logits(model), model.requires_grad_(True)
    names = [name for name, _ in model.named_parameters()]
    apply, params = module.functionalize_adapter(model, config_of(kind))
    assert names == [name for name, p in model.named_parameters() if p.requires_grad]
    base, trained = fzero.functionalize(model)[1], moved(params)
    found = apply(base, trained, input_ids=IDS).logits
    assert (found - before).abs().max() > 1e-5

    module.save_adapter(tmp_path, fzero.init(trained, fzero.optim.sgd(0.1), stage=2), apply)
    by_peft = read(model, tmp_path)
    assert torch.equal(logits(by_peft), found)
    assert sorted(os.listdir(tmp_path)) == ["adapter_config.json", "adapter_model.safetensors"]

    by_peft.save_pretrained(tmp_path / "back")
    again = module.load_adapter(tmp_path / "back", apply)
    assert [*again] == [*params]
    assert all(torch.equal(again[path], x) for path, x in trained.items())
    new, _ = module.functionalize_adapter(model, peft.PeftConfig.from_pretrained(str(tmp_path)))
    assert torch.equal(new(base, again, input_ids=IDS).logits, found)


def test_a_base_in_bf16_has_adapters_in_fp32_of_other_ranks(tmp_path: Path) -> None:
    model = llama().bfloat16()
    base = fzero.functionalize(model)[1]
    for rank in (2, 5):  # over one base
        config = peft.LoraConfig(r=rank, target_modules="all-linear")
        apply, params = module.functionalize_adapter(model, config)
        assert {x.dtype for x in params.values()} == {torch.float32}
        state = fzero.init(moved(params), fzero.optim.sgd(0.1), stage=3)
        module.save_adapter(tmp_path, state, apply)  # replaces that of the other rank
        found = apply(base, fzero.full_params(state), input_ids=IDS).logits
        assert torch.equal(found, logits(read(model, tmp_path)))
    assert config.target_modules == "all-linear"  # the caller's config stays as it is


def test_each_call_draws_anew_and_no_weight_is_copied() -> None:
    model = llama()
    (apply, one), (_, two) = (module.functionalize_adapter(model, config_of("all")) for _ in "ab")
    assert not all(torch.equal(one[path], x) for path, x in two.items())
    base = dict(model.named_parameters())
    assert apply.names.keys() == base.keys() | one.keys()
    del base["lm_head.weight"]
    with pytest.raises(LayoutError, match=r"no 'base_model.model.lm_head.base_layer.weight'|no 'b"):
        apply(base, one, input_ids=IDS)


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "prompt_em"),
        (lambda: peft.VeraConfig(target_modules=["q_proj"]), "saves base_model.vera_A"),
        (
            lambda: peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"),
            r"writes to model.layers.0.self_attn.q_proj.weight of the base(.*\n)*.*=True",
        ),
        (lambda: {"r": 4}, "dict in the place of the config"),
    ],
)
def test_what_its_file_would_not_have_is_refused(config: Any, seen: str) -> None:
    model = llama().float()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(LayoutError, match=seen):
        module.functionalize_adapter(model, config())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_another_adapter_or_a_part_is_refused_and_what_was_saved_stays(tmp_path: Path) -> None:
    model, rule = llama(), fzero.optim.sgd(0.1)
    base = fzero.functionalize(model)[1]
    apply, params = module.functionalize_adapter(model, config_of("all"))
    with pytest.raises(LayoutError, match="PeftModelForCausalLM in the place of the model"):
        module.functionalize_adapter(peft.get_peft_model(llama(), config_of("all")), apply.config)
    module.save_adapter(tmp_path, fzero.init(params, rule, stage=0), apply)

    first, *rest = params
    short = {path: params[path] for path in rest}
    narrow = {**params, first: params[first][1:]}
    for wrong, seen in (
        (base, f"nothing at {first}"),
        (short, f"nothing at {first}"),
        ({**params, **base}, "at model.embed_tokens.weight, the adapter nothing"),
        (narrow, rf"\(3, 16\) at {first}, the adapter \(4, 16\)"),
    ):
        state = fzero.init(wrong, rule, stage=2)
        with pytest.raises(LayoutError, match=seen):
            module.save_adapter(tmp_path, state, apply)
    for wrong in ({**params, "more": base["lm_head.weight"]}, short):
        with pytest.raises(LayoutError, match=r"unexpected 'more'|params has no"):
            apply(base, wrong, input_ids=IDS)
    for change, seen in (({"r": 2}, "r=4 in"), ({"lora_alpha": 9}, "lora_alpha=3 in .* 9 in appl")):
        other, _ = module.functionalize_adapter(model, peft.LoraConfig(**LORA["all"] | change))
        with pytest.raises(LayoutError, match=seen):
            module.load_adapter(tmp_path, other)
    other, _ = module.functionalize_adapter(model, config_of("dora"))
    with pytest.raises(LayoutError):
        module.load_adapter(tmp_path, other)
    again = module.load_adapter(tmp_path, apply)
    assert all(torch.equal(again[path], x) for path, x in params.items())

    with pytest.raises(CheckpointError, match="is missing"):
        module.load_adapter(tmp_path / "nowhere", apply)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="damaged"):
        module.load_adapter(tmp_path, apply)
    with pytest.raises(LayoutError, match=r"an engine(.*\n)*.*model.save_pretrained"):
        made = peft.get_peft_model(llama(), config_of("all"))
        module.save_adapter(tmp_path, Engine(made, torch.optim.SGD, stage=0), apply)


def test_weights_of_the_base_in_a_file_are_left_out_with_a_word(tmp_path: Path) -> None:
    model = llama()
    apply, params = module.functionalize_adapter(model, config_of("embedding"))
    peft.get_peft_model(llama(), config_of("embedding")).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="embed_tokens.base_layer.weight first: they are left out"):
        assert module.load_adapter(tmp_path, apply).keys() == params.keys()


def test_virtual_ranks_save_what_one_has(tmp_path: Path) -> None:
    model = llama()
    apply, params = module.functionalize_adapter(model, config_of("all"))
    step = fzero.shard(lambda state: (state, None), stage=3)
    state = fzero.simulate(step, world_size=3).init(params, fzero.optim.sgd(0.1))
    module.save_adapter(tmp_path, state, apply)
    found = module.load_adapter(tmp_path, apply)
    assert all(torch.equal(found[path], x) for path, x in params.items())


def test_what_the_docstrings_show() -> None:
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.attempted and not found.failed


@contextmanager
def quiet() -> Iterator[None]:
    """In a rank, where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@on_ranks(2, timeout_s=200)
def test_processes_save_and_load_at_each_stage(rank: int, world_size: int, tmp_path: Path) -> None:
    with quiet():
        model = llama()
        apply, params = module.functionalize_adapter(model, config_of("all"))
        for stage in (0, 2, 3):
            state = fzero.init(moved(params, stage + rank), fzero.optim.sgd(0.1), stage=stage)
            wanted = fzero.full_params(state)  # rank 0's
            module.save_adapter(tmp_path, state, apply)
            found = module.load_adapter(tmp_path, apply)
            assert all(torch.equal(found[path], x) for path, x in wanted.items())
        if rank == 1:
            (tmp_path / "adapter_model.safetensors").write_bytes(b"")
        fzero.psum(torch.zeros(()))
        with pytest.raises(CheckpointError, match="damaged"):
            module.load_adapter(tmp_path, apply)
        with pytest.raises(CheckpointError):
            where = tmp_path / ("adapter_config.json" if rank == 0 else "elsewhere")
            module.load_adapter(where, apply)


# Under a trainer.

KINDS: dict[str, dict[str, Any]] = {
    "dora": {"tied": True},
    "head": {"reentrant": True},
    "all": {"low": True},
    "tokens": {},
}


def trainer_of(kind: str, stage: int | None, folder: Path, ranks: int) -> Any:
    from fzero.integrations.transformers import sharded

    how = KINDS[kind]
    model = llama(how.get("tied", False))
    model = model.bfloat16() if how.get("low") else model
    model = peft.get_peft_model(model, config_of(kind))
    texts = torch.randint(3, 64, (48, 8), generator=torch.Generator().manual_seed(3))
    common: dict[str, Any] = {"output_dir": str(folder), "learning_rate": 1e-2, "logging_steps": 1}
    common |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 4}
    common |= {"save_steps": 2, "per_device_train_batch_size": 8 // ranks}
    common |= {"activation_checkpointing": True}
    common |= {"activation_checkpointing_kwargs": {"use_reentrant": how.get("reentrant", False)}}
    cls = transformers.Trainer if stage is None else sharded(transformers.Trainer, stage=stage)
    rows = [{"input_ids": ids, "labels": ids} for ids in texts]
    return cls(model=model, args=transformers.TrainingArguments(**common), train_dataset=rows)


def losses(trainer: Any, resume: Path | None = None) -> Tensor:
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    seen = [e for e in trainer.state.log_history if "loss" in e]
    return torch.tensor([(e["loss"], e["grad_norm"]) for e in seen], dtype=torch.float64)


@on_ranks(2, timeout_s=280)
@pytest.mark.parametrize(
    "kind", ["dora", "all", *(pytest.param(x, marks=pytest.mark.slow) for x in ("head", "tokens"))]
)
def test_a_trainer_gives_the_adapter_of_one_process_saves_it_alone_and_resumes(
    rank: int, world_size: int, kind: str, tmp_path: Path
) -> None:
    low = KINDS[kind].get("low", False)
    tol: Any = {"rtol": 0.02, "atol": 1e-3} if low else {"rtol": 1e-6, "atol": 1e-6}
    with quiet():
        with launched(0, 1):
            alone = trainer_of(kind, None, tmp_path / f"alone-{rank}", 1)
            first = logits(alone.model)
            wanted = losses(alone)
            after = logits(alone.model.eval())
            assert (after - first).abs().max() > 0.01  # they change
        for stage, other in ((3, 2), (2, 3)):
            folder = tmp_path / str(stage)
            with launched(rank, world_size):
                trainer = trainer_of(kind, stage, folder, world_size)
                torch.testing.assert_close(losses(trainer), wanted, **tol)
                (engine,) = trainer.accelerator.engines
                with fzero.count_collectives() as log:
                    trainer.save_model(str(folder / "saved"))
                sent = sum(e.numel for e in log.of(rank) if e.op == "all_gather")
                layout = engine.state.setup.layout
                learn = sum(layout.full_numel(i) for i in layout.trainable)
                assert sent == (learn if stage == 3 else 0)  # and nothing of the base
                trainer.accelerator.wait_for_everyone()
                text = (folder / "checkpoint-2" / "fzero" / "checkpoint.json").read_text()
                frozen = [leaf for leaf in layout.leaves if not leaf.trainable]
                assert text.count("frozen, left out") == len(frozen) > 10  # no base
                engine.close()
            found = logits(read(plain(kind), folder / "saved"))
            torch.testing.assert_close(found, after, rtol=0.05 if low else 1e-9, atol=tol["atol"])
            with launched(rank, world_size):
                resumed = trainer_of(kind, other, folder, world_size)
                torch.testing.assert_close(losses(resumed, folder / "checkpoint-2"), wanted, **tol)
                resumed.accelerator.engines[0].close()


def plain(kind: str) -> Any:
    model = llama(KINDS[kind].get("tied", False))
    return model.bfloat16() if KINDS[kind].get("low") else model


# The examples.


@contextmanager
def beside() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLES))


def check_examples(ranks: int) -> None:
    said = run("adapters.py")
    off = re.findall(rf"check: adapters on {ranks} rank.* to (\S+)$", said, re.MULTILINE)
    assert len(off) == 1 and float(off[0]) < 1e-9, said
    assert f"'base': {190720 // ranks}, 'both': {208904 if ranks == 1 else 139272}" in said


def test_the_example_of_states_alone() -> None:
    check_examples(1)


@on_ranks(2, timeout_s=200)
def test_the_examples_on_two_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    with quiet(), launched(rank, world_size):
        said = run(f"hf_lora.py --folder {tmp_path}")
        assert ("read by PEFT" in said) == (rank == 0)
        if rank == 0:
            held, whole = re.findall(r"each rank: ([\d,]+) of ([\d,]+)$", said, re.MULTILINE)[0]
            assert int(held.replace(",", "")) < 0.11 * int(whole.replace(",", ""))
            check_examples(2)
        else:
            run("adapters.py")


@pytest.mark.parametrize("script", ["adapters.py", "hf_lora.py"])
def test_each_is_shorter_than_100_lines(script: str) -> None:
    assert len((EXAMPLES / script).read_text(encoding="utf-8").splitlines()) < 100
