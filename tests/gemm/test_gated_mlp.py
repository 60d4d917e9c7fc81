"""The fused MLP: which modules take it, what its op answers with and without an entry, and what is counted."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlay.facts import Build, Facts, Hardware, Model, Serving
from overlay.runtime import set_options
from patches._lib.gemm import gated_mlp, table
from tests.gemm.interpreter import output
from tests.support import applied

H200 = Facts(
    build=Build(triton="3.6.0"), hardware=Hardware(platform="cuda", arch="sm90", name="NVIDIA H200", sms=132),
    model=Model(hidden_size=2560, intermediate_size=9728), serving=Serving(tensor_parallel=1),
)  # fmt: skip

# Kernels run in Triton's interpreter, in a process of their own; without programmatic launch, which is a device's.
SCRIPT = r"""
import json, sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
from overlay.ledger import Counters
from overlay.runtime import set_options
from patches._lib.gemm import dispatch, table
from patches._lib.gemm.table import Tile

folder = sys.argv[1]
hidden, inner = 64, 24
common = {"us": 1.0, "tiles_us": 1.5, "original_us": 2.0, "limit_us": 0.5}
mlps = [
    table.Mlp("float16", 1, hidden, inner, Tile("rows", 4, 32), Tile("rows", 8, 8), **common),
    table.Mlp("float16", 2, hidden, inner, Tile("rows", 2, 32, split=2), None, **common),
    table.Mlp("float16", 5, hidden, inner, Tile("tiles", 16, 32), Tile("lanes", 8, 8, slices=2), **common),
]
found = table.Table("", "sm90", ("Chip",), 7, "3.6.0", "t", "d", "2026-01-01", 1.0, 0.02, "", {}, {m.key: m for m in mlps})
table.save(found, folder + "/chip.json")
dispatch.device_of = lambda index: table.Device("sm90", "Chip", 7, "3.6.0")
set_options("gemm-tiles", {"tables": folder})
count = Counters("gated")
calls = []

def linear(x, weight, bias):
    calls.append(list(weight.shape))
    return torch.nn.functional.linear(x, weight, bias)

def activation(x):
    calls.append("activation")
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up

registered = {}
dispatch.register = lambda name, function, fake: registered.setdefault(name, (function, fake))[0]
op = dispatch.mlp_op("gated", dispatch.Chooser("gated", count, "mlps", "gemm-tiles"), linear, activation)
gate_up, down = (torch.randn(2 * inner, hidden) * 0.2).half(), (torch.randn(hidden, inner) * 0.2).half()
report = {}
for name, x, a, b in [
    ("the first of all", torch.randn(1, hidden).half(), gate_up, down),  # every entry is launched once
    ("one row", torch.randn(1, hidden).half(), gate_up, down),
    ("two rows", torch.randn(2, hidden).half(), gate_up, down),
    ("five rows", torch.randn(5, hidden).half(), gate_up, down),
    ("three rows", torch.randn(3, hidden).half(), gate_up, down),
    ("prefill", torch.randn(40, hidden).half(), gate_up, down),
    ("another dtype", torch.randn(1, hidden), gate_up.float(), down.float()),
    ("every other column", torch.randn(1, 2 * hidden).half()[:, ::2], gate_up, down),
    ("a gate of another width", torch.randn(1, hidden).half(), gate_up[:40].contiguous(), down[:, :20].contiguous()),
]:
    calls.clear()
    y = op(x, a, b)
    gate, up = (x.double() @ a.double().T).chunk(2, -1)
    reference = (gate * torch.sigmoid(gate) * up) @ b.double().T
    fake = registered["gated"][1](x, a, b)
    report[name] = {"calls": list(calls), "error": ((y.double() - reference).norm() / reference.norm()).item(),
                    "same": y.shape == fake.shape and y.dtype == fake.dtype}
print(json.dumps({"report": report, "counts": count.all()}))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return json.loads(output(SCRIPT, str(tmp_path_factory.mktemp("tables")))[-1])


def test_an_entry_takes_two_launches_and_everything_else_the_three_steps(outcome: dict) -> None:
    calls = {name: entry["calls"] for name, entry in outcome["report"].items()}
    assert calls["one row"] == calls["five rows"] == []
    assert calls["two rows"] == [[64, 24]]  # its second product is left to whatever a product gets
    for name in set(calls) - {"the first of all", "one row", "two rows", "five rows"}:
        assert len(calls[name]) == 3 and calls[name][1] == "activation", name


def test_every_answer_is_the_mlp_in_double_precision(outcome: dict) -> None:
    for name, entry in outcome["report"].items():
        assert entry["error"] < 3e-3 and entry["same"], name


def test_what_the_op_did_is_counted(outcome: dict) -> None:
    counts = outcome["counts"]
    assert (counts["hit 1x64x24"], counts["hit 5x64x24"]) == (2, 1)
    assert counts["refused: rows not in the table"] == 1 and counts["refused: more rows than the kernels take"] == 1
    assert counts["refused: dtype"] == 1 and counts["refused: layout"] == 1 and counts["refused: shape not in the table"] == 1


# -- which modules of a real vLLM take it

PATCHES = {"gated-mlp-qwen2": ("qwen2", "Qwen2MLP"), "gated-mlp-qwen3-5": ("qwen2_moe", "Qwen2MoeMLP"),
           "gated-mlp-llama": ("llama", "LlamaMLP")}  # fmt: skip


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    """The op replaced by a recorder that answers with zeros: on a CPU there are no kernels."""
    pytest.importorskip("vllm")
    from patches._lib.gemm import dispatch

    seen: list = []

    def op(x: object, gate_up: object, down: object) -> object:
        seen.append((x, gate_up, down))
        return x.new_zeros(x.shape)

    monkeypatch.setattr(dispatch, "mlp_op", lambda *_: op)
    return seen


@pytest.fixture
def mlp(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes vLLM's own module of one rank with plain weights, as it would be on NVIDIA."""
    linear = pytest.importorskip("vllm.model_executor.layers.linear")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import utils

    nvidia = SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(utils, "current_platform", nvidia)
    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)

    def make(name: str) -> Any:
        import torch

        module, cls = PATCHES[name]
        cls = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), cls)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(VllmConfig()):
                made = cls(32, 48, "silu")
        finally:
            torch.set_default_dtype(torch.float32)
        for weight in made.parameters():
            weight.data.normal_()
        return made

    return make


def on_device(x):
    """A tensor that says it is on a GPU."""
    import torch

    class OnDevice(torch.Tensor):
        is_cuda = property(lambda self: True)

    return x.as_subclass(OnDevice)


@pytest.mark.parametrize("name", PATCHES)
def test_vllms_own_plain_mlp_takes_the_op_and_any_other_the_original(name: str, recorded: list, mlp: Callable) -> None:
    import torch

    layer = mlp(name)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    with applied(name) as application:
        counter = application.module.count
        made = layer(on_device(x))
        (given,) = recorded
        assert given[1] is layer.gate_up_proj.weight and given[2] is layer.down_proj.weight and made.shape == x.shape
        recorded.clear()
        changes = broken(layer)
        for number, change in enumerate(changes, 1):
            undo = change()
            with contextlib.suppress(Exception):  # the original may not like what was changed: it was asked
                layer(on_device(x))
            undo()
            assert recorded == [], change
            assert counter.all()["refused: not a plain MLP of one rank"] % (len(changes) + 1) == number
        layer(x)  # not on a GPU
        assert recorded == []
        layer(on_device(x))
        assert len(recorded) == 1


def broken(layer: Any) -> list[Callable]:
    """Each condition of the gate, broken once: functions that break it and return what mends it."""
    import torch

    class Lora(torch.nn.Module):
        pass

    def swap(owner, name, value):
        def change():
            old = getattr(owner, name)
            if isinstance(owner, torch.nn.Module) and name in owner._modules:
                owner._modules[name] = value
                return lambda: owner._modules.__setitem__(name, old)
            object.__setattr__(owner, name, value)
            return lambda: object.__setattr__(owner, name, old)

        return change

    return [
        swap(layer, "gate_up_proj", Lora()),
        swap(layer, "down_proj", Lora()),
        swap(layer, "act_fn", torch.nn.SiLU()),
        swap(layer.gate_up_proj, "quant_method", object()),
        swap(layer.down_proj, "quant_method", object()),
        swap(layer.gate_up_proj, "tp_size", 2),
        swap(layer.down_proj, "tp_size", 2),
        swap(layer.gate_up_proj, "return_bias", False),
        swap(layer.down_proj.weight, "data", layer.down_proj.weight.data.float()),
    ]


def test_without_a_gpu_the_answer_is_the_originals(recorded: list, mlp: Callable) -> None:
    import torch

    layer = mlp("gated-mlp-qwen2")
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    stock = layer(x)
    with applied("gated-mlp-qwen2"):
        assert torch.equal(layer(x), stock)
    assert recorded == []


@pytest.mark.parametrize("name", PATCHES)
def test_the_gate_is_traced_whole(name: str, recorded: list, mlp: Callable) -> None:
    """torch.compile sees through every check: a graph break would end a compilation of vLLM's."""
    import torch

    layer = mlp(name)
    x = torch.randn(3, 32, dtype=torch.bfloat16)

    def traced() -> Any:
        torch._dynamo.reset()
        return torch.compile(layer, backend="eager", fullgraph=True)(x)

    stock = traced()  # not the eager answer: what is compiled takes the activation's other form
    with applied(name):
        assert torch.equal(traced(), stock)


# -- where it is planned


def test_a_model_whose_mlp_was_measured_may_use_it_and_another_hears_why_not(tmp_path: Path) -> None:
    assert gated_mlp.no_entry(H200) is None
    assert "no table has an MLP of 2560 and 9000" in gated_mlp.no_entry(
        replace(H200, model=replace(H200.model, intermediate_size=9000))
    )
    assert "overlay tune MODEL" in gated_mlp.no_entry(replace(H200, build=Build(triton="3.5.0")))
    assert gated_mlp.no_entry(replace(H200, model=Model())) is None  # the process knows


def test_the_users_own_table_counts_when_the_plan_is_made(tmp_path: Path) -> None:
    from patches.common import gemm_tiles

    other = replace(H200, hardware=replace(H200.hardware, name="Another Part"))
    assert "this is Another Part" in gemm_tiles.unusable(other)
    (shipped,) = table.SHIPPED.glob("*.json")
    table.save(replace(table.load(shipped), devices=("Another Part",)), tmp_path / "own.json")
    set_options("gemm-tiles", {"tables": str(tmp_path)})
    try:
        assert gemm_tiles.unusable(other) is None and gated_mlp.no_entry(other) is None
    finally:
        set_options("gemm-tiles", {})
