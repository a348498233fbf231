"""`python -m fzero plan`: tables in a terminal, plain text where it is piped, JSON, errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fzero.__main__ import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


def test_a_number_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "7e9", "--world", "64", "--stage", "3", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    per_rank = 7e9 / 64
    assert made["bytes"]["parameters"] == 2 * per_rank and made["bytes"]["masters"] == 4 * per_rank
    assert (
        made["bytes"]["optimizer"] == 8 * per_rank + 8
        and made["bytes"]["gradients"] == 4 * per_rank
    )
    data = [one for one in made["collectives"] if one["op"] != "agree"]
    assert sum(one["wire_bytes"] for one in data) == 3 * 2 * 7e9 / 64 * 63
    assert made["peak_bytes"] is None and made["time"] is None


def test_it_is_plain_where_it_is_piped_and_bold_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["plan", "--params", "1e6", "--world", "4x8", "--stage", "all"]
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(arguments)
    piped = capsys.readouterr().out
    assert "\033" not in piped and "4 x 8 ranks" in piped and "not known" in piped
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(arguments)
    shown = capsys.readouterr().out
    assert (
        shown.startswith("\033[1m") and shown.replace("\033[1m", "").replace("\033[0m", "") == piped
    )
    monkeypatch.setenv("NO_COLOR", "1")
    main(arguments)
    assert capsys.readouterr().out == piped


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one of the arguments --params --hf-config is required"),
        (["--params", "many"], "--params: many is no positive number"),
        (["--params", "1e6", "--hf-config", "x"], "not allowed with argument --params"),
        (["--hf-config", "x", "--world", "2", "--fits", "1e9"], "not allowed with argument"),
        (["--params", "1e6", "--world", "0"], "world=0"),
        (["--params", "1e6", "--world", "2x2x2"], "--world: 2x2x2 is no number of ranks"),
        (["--params", "1e6", "--stage", "5"], "--stage: invalid choice: '5'"),
        (["--params", "1e6", "--fits", "80e9"], "--fits with --params"),
        (["--hf-config", "/nowhere/config.json"], "could not be read as a config"),
    ],
)
def test_wrong_input(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["plan", *arguments])
    except SystemExit as ended:  # argparse has printed what is wrong
        code = ended.code
    assert code == 2
    assert says in capsys.readouterr().err


def test_a_config_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    arguments = ["plan", "--hf-config", str(tmp_path), "--length", "16", "--stage", "3"]
    assert main([*arguments, "--world", "8", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["name"] == "LlamaForCausalLM" and made["peak_bytes"] > 0
    assert made["bytes"]["masters"] == 2 * made["bytes"]["parameters"]
    assert main([*arguments, "--fits", "150e3", "--checkpoint"]) == 0
    assert "LlamaForCausalLM: stage 3 on" in capsys.readouterr().out
    names = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    file.write_text(json.dumps(names | sizes | {"vocab_size": 50, "decoder_start_token_id": 0}))
    assert main([*arguments, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    # Embedding; 3 attentions, 2 MLPs, 7 norms; 32 buckets of positions for 4 heads, twice.
    numel = 50 * 16 + 3 * 4 * 16 * 16 + 2 * 2 * 16 * 32 + 7 * 16 + 2 * 32 * 4
    assert made["name"] == names["architectures"][0] and made["bytes"]["parameters"] == 2 * numel
    file.write_text('{"model_type": "unheard of"}')
    assert main([*arguments]) == 2
    assert "model_type 'unheard of'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_position_embeddings": 8}, "--length 16, and LlamaForCausalLM has 8 positions"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"model_type": "vit"}, "'vit' says no architectures"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "could not be run on [1, 16]"),
    ],
)
def test_configs_that_cannot_be_planned(
    change: dict[str, object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | change))
    assert main(["plan", "--hf-config", str(file), "--length", "16"]) == 2
    assert says in capsys.readouterr().err
