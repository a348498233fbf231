"""The service of adapters keeps every client's bits, whoever else is connected."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fzero
from tests.rank_process import LOOPBACK
from tests.ranks import run_ranks, spawn_script

TIER_INPUTS = ("examples",)  # tests/tiers.py: a push that changes them runs these tests

FOLDER = Path(__file__).parent.parent / "examples" / "service"
HAS_LIBRARIES = all(map(importlib.util.find_spec, ("transformers", "peft")))
pytestmark = [
    pytest.mark.xdist_group("gloo"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not HAS_LIBRARIES, reason="needs the extra `examples`"),
]
ROW = {"tokens": [1, 2, 3], "targets": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
SIZES: Any = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def module_of(name: str) -> Any:
    """Return a file of the example as a module; `server` imports `wire`."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


wire = module_of("wire")


@contextlib.contextmanager
def service(ranks: int, stage: int, folder: Path) -> Iterator[tuple[int, list[Any]]]:
    """Run the service on some ranks; give its port, and the processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:  # where the ranks meet each other
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    world |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    world |= {"PYTHONPATH": str(FOLDER.parent.parent)}
    command = [sys.executable, str(FOLDER / "server.py"), "--stage", str(stage), "--port", "0"]
    started = []
    for rank in range(ranks):
        env = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(
            [*command, "--folder", str(folder)], env=env, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
    try:
        said = re.match(r"on port (\d+)", started[0].stdout.readline())
        assert said is not None
        yield int(said[1]), started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with service(2, 3, tmp_path_factory.mktemp("adapters")) as (number, _):
        yield number


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage"), [(2, 2), (3, 3), (4, 0)])
def test_its_claims_on_other_ranks_and_stages(ranks: int, stage: int, tmp_path: Path) -> None:
    given = ["--stage", str(stage), "--folder", str(tmp_path)]
    done = spawn_script(FOLDER / "server.py", ranks, given, timeout_s=280)
    assert done.returncode == 0, done.stderr
    wanted = f"check: 3 clients among 4 have the bits of each alone, on {ranks} rank(s)"
    assert wanted in done.stdout


def test_its_claims_alone(tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "server.py", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "check: 3 clients among 4 have the bits of each alone, on 1 rank(s)" in done.stdout


def test_its_claims(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    wire.check(port)
    assert "bytes on each rank: base [24032, 24032], each client [52232, 52232]" in (
        capsys.readouterr().out
    )


PLAIN: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda new, row: -row["weights"] * new,
    "importance_sampling": lambda new, row: -row["advantages"] * torch.exp(new - row["logprobs"]),
    "ppo": lambda new, row: (
        -torch.minimum(
            torch.exp(new - row["logprobs"]) * row["advantages"],
            torch.exp(new - row["logprobs"]).clamp(0.8, 1.2) * row["advantages"],
        )
    ),
}


def model_and_adapter() -> Any:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    from fzero.integrations.peft import functionalize_adapter

    warnings.simplefilter("ignore", FutureWarning)  # transformers' own, of what PEFT asks it
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, vocab_size=64))
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    apply, params = functionalize_adapter(model, lora)
    draw = torch.Generator().manual_seed(7)
    for name, x in params.items():
        x.zero_()
        if "lora_A" in name:
            torch.nn.init.kaiming_uniform_(x, a=math.sqrt(5), generator=draw)
    return fzero.functionalize(model)[1], apply, params


def without_a_service(rank: int, ranks: int, stage: int, calls: list[Any]) -> int:
    """Make the calls of a client on one state, in a program that knows of no service."""
    base, apply, params = model_and_adapter()
    frozen = fzero.codecs.nf4(block=64)
    frozen_base = fzero.init(base, fzero.optim.no_optimizer(), stage=stage, frozen=frozen)
    state: Any = fzero.init(params, fzero.optim.adamw(0.02, weight_decay=0.0), stage=stage)
    for rows, loss in calls:
        if loss == "step":
            state = fzero.apply_gradients(state)
            continue
        width = max(len(row["tokens"]) for row in rows)
        rows = rows + [{key: [] for key in rows[0]}] * (-len(rows) % ranks)
        mine = rows[len(rows) // ranks * rank :][: len(rows) // ranks]
        batch = {
            key: torch.tensor(
                [row[key] + [0] * (width - len(row[key])) for row in mine],
                dtype=torch.int64 if key in ("tokens", "targets") else torch.float32,
            )
            for key in rows[0]
        }

        def loss_of(p: Any, batch: Any = batch, loss: str = loss) -> Tensor:
            logits = apply(p["base"], p["adapter"], input_ids=batch["tokens"]).logits
            logs = torch.log_softmax(logits, -1)
            new = logs.gather(-1, batch["targets"].unsqueeze(-1)).squeeze(-1)
            return PLAIN[loss](new, batch).sum() * fzero.axis_size()

        both = {"base": frozen_base, "adapter": state}
        both, _ = fzero.grad_and_reduce(loss_of, both, wrt="adapter")()
        state = both["adapter"]
    bits = [x.numpy().tobytes() for x in optree.tree_leaves(state, namespace="fzero")]
    return int.from_bytes(hashlib.sha256(b"".join(bits)).digest()[:6])


def test_a_client_has_the_bits_of_a_program_without_a_service(port: int) -> None:
    """All losses, several calls to an update, and beside it a client of noise."""
    me, other = wire.Client(port, "plain"), wire.Client(port, "noise")
    me.create(seed=7, lr=0.02)
    other.create(seed=1)
    draw, calls = random.Random(0), []

    def asked(rows: list[Any], loss: str) -> Any:
        wire.disturb(wire.Client(port, f"bad{len(calls)}"))
        other.forward_backward(batch=[ROW] * draw.randint(1, 5), loss="cross_entropy")
        calls.append((rows, loss))
        return me.forward_backward(batch=rows, loss=loss)

    for _ in range(3):
        rows: list[Any] = []
        for size in (draw.randint(1, 20) for _ in range(draw.randint(1, 5))):
            tokens = [draw.randrange(64) for _ in range(size + 1)]
            weights = [draw.random() for _ in range(size)]
            rows.append({"tokens": tokens[:-1], "targets": tokens[1:], "weights": weights})
        said = asked(rows, "cross_entropy")
        policy = [
            {"tokens": row["tokens"], "targets": row["targets"], "logprobs": old}
            | {"advantages": [draw.gauss(0, 1) for _ in old]}
            for row, old in zip(rows, said["logprobs"], strict=True)
        ]
        asked(policy, "importance_sampling")
        asked(policy, "ppo")
        me.optim_step()
        other.optim_step()
        calls.append(([], "step"))
    asked(rows, "cross_entropy")  # and a gradient that waits
    assert run_ranks(without_a_service, 2, 3, calls) == me.status()["digest"]


def test_the_losses_of_a_policy_are_their_formulas(port: int) -> None:
    me = wire.Client(port, "policy")
    me.create(seed=3)
    old, advantages = [-4.0, -4.6, -3.5], [1.0, -2.0, 0.5]
    row = ROW | {"logprobs": old, "advantages": advantages}
    (new,) = me.forward_backward(batch=[row], loss="cross_entropy")["logprobs"]
    ratios = [math.exp(x - y) for x, y in zip(new, old, strict=True)]
    pairs = [*zip(ratios, advantages, strict=True)]
    assert any(not 0.8 < r < 1.2 for r in ratios)
    wanted = {
        "importance_sampling": -sum(r * a for r, a in pairs),
        "ppo": -sum(min(r * a, min(max(r, 0.8), 1.2) * a) for r, a in pairs),
    }
    for loss, value in wanted.items():
        said = me.forward_backward(batch=[row], loss=loss)
        assert said["loss"] == pytest.approx(value, rel=1e-5) and said["logprobs"] == [new]


def test_the_gradient_of_a_policy_at_its_own_logarithms_is_that_of_weights(port: int) -> None:
    norms = []
    for i, loss in enumerate(("cross_entropy", "importance_sampling", "ppo")):
        me = wire.Client(port, f"own{i}")
        me.create(seed=3)
        if not norms:
            (new,) = me.forward_backward(batch=[ROW], loss="cross_entropy")["logprobs"]
            me.delete()
            me.create(seed=3)
        row = ROW | {"weights": [1, -2, 0.5], "advantages": [1, -2, 0.5], "logprobs": new}
        norms.append(me.forward_backward(batch=[row], loss=loss)["norm"])
    assert norms[0] > 0.01 and norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def answered(port: int, sent: bytes) -> Any:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
        raw.makefile("rb") as file,
    ):
        raw.sendall(sent)
        return json.loads(file.readline())


@pytest.mark.parametrize(
    "sent",
    [
        b"no json",
        b"",
        b"\xff\x00",
        b"[" * 10**5,
        b"9" * 5000,
        b"[1]",
        b"{}",
        b'{"method": "answer"}',
        b'{"method": "__call__"}',
        b'{"method": "__init__", "stage": 0, "folder": ""}',
        b'{"method": ["status"]}',
        b'{"method": "_new", "client": "a"}',
        b'{"method": "status", "self": 1}',
        b'{"method": "status", "client": "nobody"}',
        b'{"method": "status", "client": ["a"]}',
        b'{"method": "status", "id": NaN}',
        b'{"method": "status", "id": [[1]]}',
        b'{"method": "create", "client": "../../x"}',
        b'{"method": "create", "client": "x\\n"}',
        b'{"method": "create", "client": ""}',
        b'{"method": "create", "client": 5}',
        b'{"method": "create", "client": "x", "lr": 1e999}',
        b'{"method": "create", "client": "x", "lr": NaN}',
        b'{"method": "create", "client": "x", "seed": true}',
        b'{"method": "create", "client": "x", "seed": 1e3}',
        b'{"method": "create", "client": "x", "seed": 1' + b"0" * 400 + b"}",
        b'{"method": "fork", "client": "nobody", "to": "x"}',
        b'{"method": "delete", "client": "nobody"}',
        b'{"method": "save", "client": "nobody", "to": "x"}',
        b'{"method": "load", "client": "nobody", "path": "a/b"}',
    ],
)
def test_what_is_no_request_is_answered_with_its_cause_and_fix(port: int, sent: bytes) -> None:
    found = answered(port, sent + b"\n")["error"]
    assert "Usual cause:" in found["message"] and "Fix:" in found["message"]
    assert "x" not in answered(port, b'{"method": "status"}\n')["result"]["clients"]


def test_an_id_comes_back(port: int) -> None:
    for number in (0, 2**70, "a text", True):
        request = {"method": "status", "id": number}
        assert answered(port, json.dumps(request).encode() + b"\n")["id"] == number
        wrong = {"method": "nothing", "id": number}
        assert answered(port, json.dumps(wrong).encode() + b"\n")["id"] == number


def test_a_line_that_is_too_long_ends_its_connection(port: int) -> None:
    raw = wire.Client(port, "long")
    with pytest.raises((wire.ServiceError, OSError), match=r"closed|reset|Broken"):
        raw.call(method="status", client="x" * (2**21))
    assert answered(port, b'{"method": "status"}\n')["result"]


def test_too_many_connections_are_closed_and_those_that_are_there_go_on(port: int) -> None:
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(wire.CONNECTIONS + 10)
        ]
        files = [stack.enter_context(x.makefile("rwb")) for x in held]
        said = []
        for file in files:
            with contextlib.suppress(OSError):
                file.write(b'{"method": "status"}\n')
                file.flush()
                said.append(file.readline())
        assert 80 < sum(map(bool, said)) <= wire.CONNECTIONS
        files[0].write(b'{"method": "status"}\n')
        files[0].flush()
        assert json.loads(files[0].readline())["result"]
    for _ in range(100):  # the service hears of what was closed
        with contextlib.suppress(OSError, ValueError):
            if answered(port, b'{"method": "status"}\n')["result"]:
                return
        time.sleep(0.1)
    raise AssertionError("the service takes no connection any more")


def test_many_requests_in_one_piece_are_answered_in_order_while_others_have_their_turn(
    port: int,
) -> None:
    count, ended = 200, []
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
        raw.makefile("rb") as file,
    ):
        lines = [json.dumps({"method": "status", "id": i}).encode() for i in range(count)]
        reader = threading.Thread(
            target=lambda: ended.extend(json.loads(file.readline())["id"] for _ in range(count))
        )
        reader.start()
        raw.sendall(b"\n".join(lines) + b"\n")
        assert answered(port, b'{"method": "status"}\n')["result"]
        early = len(ended)
        reader.join(60)
    assert ended == [*range(count)] and early < count


def test_a_client_that_is_refused_stays_as_it_was(port: int) -> None:
    me = wire.Client(port, "refused")
    me.create(seed=1)
    me.forward_backward(batch=[ROW], loss="cross_entropy")
    before = me.status()
    wrong: list[dict[str, Any]] = [
        {"batch": [ROW], "loss": "mse"},
        {"batch": [ROW], "loss": ["ppo"]},
        {"batch": [ROW | {"weights": [float("nan")] * 3}], "loss": "cross_entropy"},
        {"batch": [ROW | {"weights": [1e30] * 3}], "loss": "cross_entropy"},
        {"batch": [ROW | {"weights": [10**400] * 3}], "loss": "cross_entropy"},
        {"batch": [ROW | {"weights": ["1"] * 3}], "loss": "cross_entropy"},
        {"batch": [ROW | {"weights": "111"}], "loss": "cross_entropy"},
        {"batch": [ROW | {"weights": [[1]] * 3}], "loss": "cross_entropy"},
        {"batch": [ROW | {"weights": None}], "loss": "cross_entropy"},
        {"batch": [ROW | {"targets": [1]}], "loss": "cross_entropy"},
        {"batch": [ROW | {"tokens": [-1, 2, 3]}], "loss": "cross_entropy"},
        {"batch": [ROW | {"tokens": [1.5, 2, 3]}], "loss": "cross_entropy"},
        {"batch": [ROW | {"targets": [64, 2, 3]}], "loss": "cross_entropy"},
        {"batch": [{key: [] for key in ROW}], "loss": "cross_entropy"},
        {"batch": [ROW, {key: [[1, 2]] for key in ROW}], "loss": "cross_entropy"},
        {"batch": [ROW, [ROW]], "loss": "cross_entropy"},
        {"batch": [ROW], "loss": "ppo"},
        {"batch": [], "loss": "cross_entropy"},
        {"batch": {"tokens": [1]}, "loss": "cross_entropy"},
        {"batch": [ROW] * 65, "loss": "cross_entropy"},
        {"batch": [{key: [0] * 129 for key in ROW}], "loss": "cross_entropy"},
    ]
    for request in wrong:
        with pytest.raises(wire.ServiceError, match="Fix:"):
            me.forward_backward(**request)
        assert me.status() == before
    for prompt, count in (([], 1), ([1], 128), ([1] * 128, 1), ([64], 1), ("ab", 1), ([1], "1")):
        with pytest.raises(wire.ServiceError, match="Fix:"):
            me.sample(prompt=prompt, max_tokens=count)
    for path in ("../refused/x", "refused", "refused/../x", "/etc/x", 5):
        with pytest.raises(wire.ServiceError, match="Fix:"):
            me.load(path=path)
    with pytest.raises(wire.ServiceError, match="Fix:"):
        me.save(to="..")
    with pytest.raises(wire.ServiceError, match="PhaseError"):
        me.save(to="pending")
    with pytest.raises(wire.ServiceError, match="CheckpointError"):
        me.load(path="refused/never")
    with pytest.raises(wire.ServiceError, match="taken"):
        me.create()
    with pytest.raises(wire.ServiceError, match="taken"):
        me.fork(to="refused")
    assert me.status() == before
    me.optim_step()
    with pytest.raises(wire.ServiceError, match="PhaseError"):
        me.optim_step()


def test_a_fork_goes_its_own_way(port: int) -> None:
    one, two = wire.Client(port, "one"), wire.Client(port, "two")
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


def test_there_is_place_for_64_clients(port: int) -> None:
    me = wire.Client(port, "many")
    free = 64 - len(me.call(method="status")["clients"])
    names = [f"many{i}" for i in range(free)]
    for name in names:
        me.call(method="create", client=name)
    with pytest.raises(wire.ServiceError, match="too many"):
        me.create()
    with pytest.raises(wire.ServiceError, match="too many"):
        me.call(method="fork", client="many0", to="many")
    for name in names:
        me.call(method="delete", client=name)
    me.create()
    me.delete()


def asked_of(service: Any, rank: int, **request: Any) -> Any:
    return json.loads(service(json.dumps(request).encode() if rank == 0 else None))


def failures_of_one_rank(rank: int, _: int, folder: str) -> dict[str, Any]:
    """Let rank 1 fail in each of several places; return what was answered."""
    warnings.simplefilter("ignore", FutureWarning)  # transformers' own, of what PEFT asks it
    service, update = module_of("server").Service(3, folder), fzero.apply_gradients

    def broken(*given: Any, **_: Any) -> Any:
        if given and isinstance(given[0], fzero.TrainState):
            update(*given)  # after all that ranks do together
        raise OSError("rank 1 has no more memory")

    train = {"client": "a", "batch": [ROW], "loss": "cross_entropy"}
    asked_of(service, rank, method="create", client="a")
    asked_of(service, rank, method="forward_backward", **train)
    asked_of(service, rank, method="optim_step", client="a")
    asked_of(service, rank, method="save", client="a", to="b")
    asked_of(service, rank, method="fork", client="a", to="pending")
    asked_of(service, rank, method="forward_backward", **train | {"client": "pending"})

    def all_of_it() -> list[Any]:
        return [asked_of(service, rank, method="status", client=x) for x in ("a", "pending")]

    before, found = all_of_it(), {}
    requests: list[tuple[Any, str, dict[str, Any]]] = [
        (service, "load", {"method": "load", "client": "a", "path": "a/b"}),
        (service, "create", {"method": "create", "client": "b"}),
        (service, "_apply", {"method": "forward_backward", **train}),
        (os, "fsync", {"method": "save", "client": "a", "to": "b"}),
        (fzero, "apply_gradients", {"method": "optim_step", "client": "pending"}),
    ]
    for owner, name, request in requests:
        whole = getattr(owner, name)
        if rank == 1:
            setattr(owner, name, broken)
        found[name] = asked_of(service, rank, **request)
        setattr(owner, name, whole)
        assert all_of_it() == before
    assert "result" in asked_of(service, rank, method="create", client="b")
    return found


def test_what_fails_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    found, _ = run_ranks(failures_of_one_rank, 2, str(tmp_path))
    assert {name: said["error"]["name"] for name, said in found.items()} == {
        "load": "MismatchError",
        "create": "MismatchError",
        "_apply": "PeerFailedError",
        "fsync": "CheckpointError",
        "apply_gradients": "RankError",
    }, found
    assert "rank 1 failed alone" in found["apply_gradients"]["error"]["message"]
    assert all("Fix:" in said["error"]["message"] for said in found.values())


HELD = """
import gc, json, sys, torch, fzero, server
service = server.Service(3, "unused")

def held():
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
    parts = {x.data_ptr(): x.nbytes() for x in storages}
    return sum(parts.values())

found = [held()]
for i in range(4):
    request = {"method": "create", "client": f"c{i}", "seed": i}
    assert "result" in json.loads(service(json.dumps(request).encode()))
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
import json, sys, peft, torch, transformers, fzero, server
service = server.Service(3, sys.argv[1])

def ask(**request):
    return json.loads(service(json.dumps(request).encode()))["result"]

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
