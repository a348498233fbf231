"""The service of adapters keeps every client's bits, whoever else is connected."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TIER_INPUTS = ("examples",)  # tests/tiers.py: a push that changes them runs these tests

FOLDER = Path(__file__).parent.parent / "examples" / "service"
HAS_LIBRARIES = all(map(importlib.util.find_spec, ("transformers", "peft")))
pytestmark = [
    pytest.mark.xdist_group("gloo"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not HAS_LIBRARIES, reason="needs the extra `examples`"),
]
ROW = {"tokens": [1, 2, 3], "targets": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}


def load_client() -> Any:
    spec = importlib.util.spec_from_file_location("service_client", FOLDER / "client.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


client = load_client()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with client.service(2, 3) as number:
        yield number


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (2, 2), (3, 3)])
def test_its_claims_on_other_ranks_and_stages(ranks: int, stage: int) -> None:
    command = [sys.executable, FOLDER / "client.py", "--ranks", str(ranks), "--stage", str(stage)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert (
        f"check: 3 clients among 5 have the bits of each alone, on {ranks} rank(s)" in done.stdout
    )


def test_its_claims(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    client.check(port)
    assert "bytes on each rank: base [24032, 24032], each client [52232, 52232]" in (
        capsys.readouterr().out
    )


def answered(port: int, sent: bytes) -> Any:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
        raw.makefile("rb") as file,
    ):
        raw.sendall(sent)
        return json.loads(file.readline())


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"no json", "RequestError"),
        (b"\xff\x00", "RequestError"),
        (b"[" * 10**5, "RequestError"),
        (b"9" * 5000, "RequestError"),
        (b"x" * (2**20 + 5), "RequestError"),
        (b"[1]", "RequestError"),
        (b"{}", "RequestError"),
        (b'{"method": "answer"}', "RequestError"),
        (b'{"method": "_state", "client": "a"}', "RequestError"),
        (b'{"method": "status", "self": 1}', "RequestError"),
        (b'{"method": "status", "client": "nobody"}', "RequestError"),
        (b'{"method": "status", "client": ["a"]}', "RequestError"),
        (b'{"method": "create", "client": "../../x"}', "RequestError"),
        (b'{"method": "create", "client": "x", "lr": 1e999}', "RequestError"),
        (b'{"method": "create", "client": "x", "seed": true}', "RequestError"),
    ],
)
def test_what_is_no_request_is_answered_by_name(port: int, sent: bytes, error: str) -> None:
    found = answered(port, sent + b"\n")["error"]
    assert found["name"] == error
    if error == "RequestError":
        assert "Usual cause:" in found["message"] and "Fix:" in found["message"]
    assert answered(port, b'{"method": "status"}\n')["result"]


def test_a_client_that_is_refused_stays_as_it_was(port: int) -> None:
    me = client.Client(port, "refused")
    me.create(seed=1)
    me.forward_backward(batch=[ROW], loss="cross_entropy")
    before = me.status()
    wrong: list[dict[str, Any]] = [
        {"batch": [ROW], "loss": "mse"},
        {"batch": [ROW | {"weights": [float("nan")] * 3}], "loss": "cross_entropy"},
        {"batch": [ROW | {"weights": [1e30] * 3}], "loss": "cross_entropy"},
        {"batch": [ROW | {"weights": [10**400] * 3}], "loss": "cross_entropy"},
        {"batch": [ROW | {"targets": [1]}], "loss": "cross_entropy"},
        {"batch": [ROW | {"tokens": [-1, 2, 3]}], "loss": "cross_entropy"},
        {"batch": [ROW], "loss": "ppo"},
        {"batch": [], "loss": "cross_entropy"},
        {"batch": {"tokens": [1]}, "loss": "cross_entropy"},
        {"batch": [ROW] * 65, "loss": "cross_entropy"},
        {"batch": [ROW | {"tokens": [0] * 129}], "loss": "cross_entropy"},
    ]
    for request in wrong:
        with pytest.raises(client.ServiceError, match="Fix:"):
            me.forward_backward(**request)
        assert me.status() == before
    with pytest.raises(client.ServiceError, match="PhaseError"):
        me.save(to="pending")
    with pytest.raises(client.ServiceError, match="CheckpointError"):
        me.load(path="refused/never")
    with pytest.raises(client.ServiceError, match="taken"):
        me.create()
    assert me.status() == before
    me.optim_step()
    with pytest.raises(client.ServiceError, match="PhaseError"):
        me.optim_step()


def test_a_fork_goes_its_own_way(port: int) -> None:
    one, two = client.Client(port, "one"), client.Client(port, "two")
    one.create(seed=1)
    one.forward_backward(batch=[ROW], loss="cross_entropy")
    one.fork(to="two")
    before = one.status()["digest"]
    assert two.status()["digest"] == before
    two.optim_step()
    assert one.status()["digest"] == before != two.status()["digest"]
    one.optim_step()
    assert one.status()["digest"] == two.status()["digest"]
    asked = {"prompt": [1, 2], "max_tokens": 5}
    assert one.sample(**asked, seed=3) == two.sample(**asked, seed=3)


HELD = """
import gc, json, pathlib, torch, fzero, server
service = server.Service(3, pathlib.Path("unused"))

def held():
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
    parts = {x.data_ptr(): x.nbytes() for x in storages}
    return sum(parts.values())

found = [held()]
for i in range(4):
    request = {"method": "create", "client": f"c{i}", "seed": i}
    assert "result" in json.loads(service.answer(json.dumps(request).encode()))
    found.append(held())
sizes = [fzero.state_bytes(x)["total"] for x in (service._base, *service._clients.values())]
print(json.dumps([found, sizes]))
"""


def test_the_base_is_held_once_whatever_the_number_of_clients() -> None:
    """Of all tensors of the process: beside the states there are buffers of the model alone."""
    env = os.environ | {"PYTHONPATH": f"{FOLDER.parent.parent}{os.pathsep}{FOLDER}"}
    command = [sys.executable, "-c", HELD]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (first, *rest), (base, *clients) = json.loads(done.stdout.splitlines()[-1])
    assert base <= first < base + 4096
    steps = 8  # bytes of the number of updates, which `state_bytes` does not count
    held = [sum(clients[: i + 1]) + steps * (i + 1) for i in range(4)]
    assert [after - first for after in rest] == held


FILES = """
import json, pathlib, sys, peft, torch, transformers, fzero, server
service = server.Service(3, pathlib.Path(sys.argv[1]))

def ask(**request):
    return json.loads(service.answer(json.dumps(request).encode()))["result"]

row = {"tokens": [1, 2, 3], "targets": [2, 3, 4], "weights": [1, 1, 1]}
train = {"client": "a", "batch": [row], "loss": "cross_entropy"}
ask(method="create", client="a")
before = ask(method="forward_backward", **train)["logprobs"][0]
ask(method="optim_step", client="a")
ask(method="save", client="a", to="one")
wanted = torch.tensor(ask(method="forward_backward", **train)["logprobs"][0])
sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64))
model.load_state_dict(fzero.full_params(service._base), strict=False)  # of nf4, decoded
read = peft.PeftModel.from_pretrained(model, f"{sys.argv[1]}/a/one")
with torch.no_grad():
    found = read(torch.tensor([row["tokens"]])).logits.log_softmax(-1)[0].gather(
        1, torch.tensor(row["targets"])[:, None])[:, 0]
torch.testing.assert_close(found, wanted)
assert (found - torch.tensor(before)).abs().max() > 1e-3
"""


def test_peft_reads_what_a_client_saves(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": f"{FOLDER.parent.parent}{os.pathsep}{FOLDER}"}
    command = [sys.executable, "-c", FILES, tmp_path]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "a" / "one").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "state"}


def test_its_files_are_short() -> None:
    for path in FOLDER.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 200
