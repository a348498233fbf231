"""The table of keys beside DeepSpeed's own: it has every key, with DeepSpeed's default."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from fzero.integrations.deepspeed._config import read_config, with_defaults
from tests.integrations.deepspeed.configs import merged, nested

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: pip install fzero[bench]",
    ),
]
FIELDS = """
import enum, json
from pydantic_core import PydanticUndefined
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero import config, offload_config
kinds = {
    "zero_optimization": config.DeepSpeedZeroConfig,
    "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
}
found = {}
for section, kind in kinds.items():
    for name, field in kind.model_fields.items():
        value = field.default.value if isinstance(field.default, enum.Enum) else field.default
        plain = value is None or isinstance(value, (bool, int, float, str))
        for written in {name, field.alias or name}:
            found[f"{section}.{written}"] = value if plain else None
print("FOUND" + json.dumps(found))
"""


def test_every_key_of_deepspeed_is_known_and_its_default_asks_for_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FIELDS], capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.rpartition("FOUND")[2])
    assert len(found) > 80
    for path, value in found.items():
        section, _, name = path.rpartition(".")
        looks = "offload" in section and name != "device"  # at a section that is on, only
        base = nested(section, {"device": "cpu"} if looks else {})
        reading = read_config(merged(base, nested(path, value)))
        assert not reading.problems, path
        assert with_defaults(reading.given) == with_defaults(read_config(base).given), path
