"""Qwen3's layers with their norms inside the products: the op's answers, the layer's code, the gate, the plan."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches._lib.gemm import table
from patches.common import normed_layer_qwen3
from tests.gemm.interpreter import output
from tests.gemm.test_gated_mlp import H200, on_device
from tests.support import applied

ID = "normed-layer-qwen3"

# Kernels run in Triton's interpreter, in a process of their own; without programmatic launch, which is a device's.
SCRIPT = r"""
import json, sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
from overlay.ledger import Counters
from overlay.runtime import set_options
from patches._lib.gemm import dispatch, table
from patches._lib.gemm.table import Normed, Tile

folder = sys.argv[1]
hidden, inner, width = 64, 24, 40
figures = {"us": 1.0, "apart_us": 2.0, "limit_us": 0.5}
made = [
    Normed("float16", 1, width, hidden, False, Tile("rows", 4, 32), None, **figures),
    Normed("float16", 1, 2 * inner, hidden, True, Tile("rows", 4, 32), Tile("rows", 8, 8), **figures),
    Normed("float16", 2, 2 * inner, hidden, True, Tile("rows", 2, 64), None, **figures),
]
found = table.Table("", "sm90", ("Chip",), 7, "3.6.0", "t", "d", "2026-01-01", 1.0, 0.02, "", {}, {},
                    {e.key: e for e in made if not e.gated}, {e.key: e for e in made if e.gated})
table.save(found, folder + "/chip.json")
dispatch.device_of = lambda index: table.Device("sm90", "Chip", 7, "3.6.0")
set_options("gemm-tiles", {"tables": folder})
count = Counters("normed")
calls = []

def linear(x, weight, bias):
    calls.append(list(weight.shape))
    return torch.nn.functional.linear(x, weight, bias)

def mlp(x, gate_up, down):
    calls.append("mlp")
    gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, -1)
    return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)

registered = {}
dispatch.register = lambda name, function, fake: registered.setdefault(name, (function, fake))[0]
product = dispatch.normed_op("product", dispatch.Chooser("normed", count, "normed", "gemm-tiles"), linear)
whole = dispatch.normed_mlp_op("whole", dispatch.Chooser("normed", count, "normed_mlps", "gemm-tiles"), linear, mlp)
w, gate_up, down = ((torch.randn(*size) * 0.2).half() for size in ((width, hidden), (2 * inner, hidden), (hidden, inner)))
gamma = (torch.randn(hidden) * 0.1 + 1).half()
report = {}
for name, rows in [("warm", 1), ("one", 1), ("two", 2), ("three", 3), ("prefill", 40), ("strided", 2)]:
    x, residual = torch.randn(2 * rows, hidden).half()[::2], torch.randn(rows, hidden).half()
    x = x if name == "strided" else x.contiguous()
    before = x.clone(), residual.clone()
    both = x.double() + residual.double()
    norm = both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma.double()
    for kind in ("product", "whole"):
        calls.clear()
        if kind == "product":
            y, kept = product(x, residual, gamma, 1e-6, w)
            reference = norm @ w.double().T
            fake = registered[kind][1](x, residual, gamma, 1e-6, w)
        else:
            y, kept = whole(x, residual, gamma, 1e-6, gate_up, down)
            gate, up = (norm @ gate_up.double().T).chunk(2, -1)
            reference = (gate * torch.sigmoid(gate) * up) @ down.double().T
            fake = registered[kind][1](x, residual, gamma, 1e-6, gate_up, down)
        report[f"{kind} {name}"] = {
            "calls": list(calls), "error": ((y.double() - reference).norm() / reference.norm()).item(),
            "kept": ((kept.double() - both).norm() / both.norm()).item(),
            "fake": [y.shape == fake[0].shape, kept.shape == fake[1].shape, y.dtype == fake[0].dtype],
            "inputs": torch.equal(x, before[0]) and torch.equal(residual, before[1]) and kept.data_ptr() != residual.data_ptr(),
        }
print(json.dumps({"report": report, "counts": count.all()}))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return json.loads(output(SCRIPT, str(tmp_path_factory.mktemp("tables")))[-1])


def test_an_entry_takes_the_kernel_and_everything_else_a_norm_and_the_rest(outcome: dict) -> None:
    calls = {name: entry["calls"] for name, entry in outcome["report"].items()}
    assert calls["product one"] == calls["whole one"] == []
    assert calls["whole two"] == [[64, 24]]  # its second product is left to whatever a product gets
    for rows in ("three", "prefill"):
        assert calls[f"product {rows}"] == [[40, 64]] and calls[f"whole {rows}"] == ["mlp"]


def test_every_answer_is_right_and_the_inputs_stay(outcome: dict) -> None:
    for name, entry in outcome["report"].items():
        assert entry["error"] < 4e-3 and entry["kept"] < 1e-3 and entry["inputs"] and all(entry["fake"]), (name, entry)


def test_what_the_ops_did_is_counted(outcome: dict) -> None:
    counts = outcome["counts"]
    assert counts["hit 1x40x64"] == 2 and counts["hit 1x48x64"] == 2 and counts["hit 2x48x64"] == 2
    assert counts["refused: rows not in the table"] == 4 and counts["refused: more rows than the kernels take"] == 2


# -- the layer of a real vLLM


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's own Qwen3 layer of one rank with plain weights, as it would be on NVIDIA; its attention a stand-in."""
    linear = pytest.importorskip("vllm.model_executor.layers.linear")
    import torch
    from transformers import Qwen3Config
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import utils
    from vllm.model_executor.models import qwen3

    nvidia = SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(utils, "current_platform", nvidia)
    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)

    class Attend(torch.nn.Module):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            """Something of every input, in every output."""
            return q + torch.cat([k, v], -1)

    monkeypatch.setattr(qwen3, "Attention", Attend)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=2
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(VllmConfig()):
        if not torch.distributed.is_initialized():
            with tempfile.NamedTemporaryFile(delete=False) as file:
                parallel_state.init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        try:
            made = qwen3.Qwen3DecoderLayer(config, prefix="model.layers.1")
        finally:
            torch.set_default_dtype(torch.float32)
        for weight in made.parameters():
            weight.data.normal_().mul_(0.3)
        yield made


def inputs() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(1)
    return torch.arange(5, 8), torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(3, 64, dtype=torch.bfloat16)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch, layer: Any) -> list[str]:
    """The ops replaced by vLLM's own norm, product and MLP: what the layer's code does around them must give stock's bits."""
    import torch

    from patches._lib.gemm import dispatch

    seen: list[str] = []
    first, second = layer.input_layernorm, layer.post_attention_layernorm

    def normed(x: Any, residual: Any, gamma: Any, eps: float, weight: Any) -> Any:
        seen.append("normed")
        assert gamma is first.weight and eps == first.variance_epsilon
        y, kept = first(torch.Tensor(x.clone()), residual.clone())
        return on_device(torch.nn.functional.linear(y, weight)), kept

    def normed_mlp(x: Any, residual: Any, gamma: Any, eps: float, gate_up: Any, down: Any) -> Any:
        seen.append("normed_mlp")
        assert gamma is second.weight and eps == second.variance_epsilon
        assert gate_up is layer.mlp.gate_up_proj.weight and down is layer.mlp.down_proj.weight
        y, kept = second(torch.Tensor(x.clone()), residual.clone())
        return layer.mlp(y), kept

    monkeypatch.setattr(dispatch, "normed_op", lambda *_: normed)
    monkeypatch.setattr(dispatch, "normed_mlp_op", lambda *_: normed_mlp)
    return seen


def test_around_the_ops_the_layer_is_vllms_own_bit_by_bit(layer: Any, ops: list[str]) -> None:
    import torch

    positions, x, residual = inputs()
    stock = layer(positions, x.clone(), residual.clone())
    with applied(ID):
        made = layer(positions, on_device(x.clone()), residual.clone())
    assert ops == ["normed", "normed_mlp"]
    assert torch.equal(torch.Tensor(made[0]), stock[0]) and torch.equal(torch.Tensor(made[1]), stock[1])


def test_a_layer_without_residual_or_not_plain_takes_the_original_and_is_counted(layer: Any, ops: list[str]) -> None:
    import torch

    positions, x, residual = inputs()
    stock = layer(positions, x.clone(), None)
    with applied(ID) as application:
        made = layer(positions, on_device(x.clone()), None)
        assert ops == [] and torch.equal(torch.Tensor(made[0]), torch.Tensor(stock[0]))
        counter = application.module.count
        before = counter.all().get("refused: not a plain layer of one rank", 0)
        changes = broken(layer)
        for number, change in enumerate(changes, 1):
            undo = change()
            with contextlib.suppress(Exception):  # the original may not like what was changed: it was asked
                layer(positions, on_device(x.clone()), residual.clone())
            undo()
            assert ops == [], change
            assert counter.all()["refused: not a plain layer of one rank"] == before + number
        layer(positions, x.clone(), residual.clone())  # not on a GPU
        assert ops == []


def broken(layer: Any) -> list[Callable[[], Callable[[], None]]]:
    """Each condition of the gate, broken once."""
    import torch

    def swap(owner: Any, name: str, value: Any) -> Callable[[], Callable[[], None]]:
        def change() -> Callable[[], None]:
            old = getattr(owner, name)
            store = owner._modules if isinstance(owner, torch.nn.Module) and name in owner._modules else None
            put = (lambda new: store.__setitem__(name, new)) if store is not None else (lambda new: setattr(owner, name, new))
            put(value)
            return lambda: put(old)

        return change

    class Other(torch.nn.Module):
        pass

    attention, norm = layer.self_attn, layer.post_attention_layernorm
    return [
        swap(attention, "qkv_proj", Other()),
        swap(attention.qkv_proj, "quant_method", object()),
        swap(attention.qkv_proj, "tp_size", 2),
        swap(attention.qkv_proj, "bias", torch.nn.Parameter(torch.zeros(1))),
        swap(layer, "mlp", Other()),
        swap(layer.mlp, "act_fn", torch.nn.SiLU()),
        swap(layer, "input_layernorm", Other()),
        swap(norm, "has_weight", False),
        swap(norm, "variance_size_override", 32),
        swap(norm.weight, "data", norm.weight.data.float()),
        swap(layer.mlp.down_proj, "tp_size", 2),
    ]


def test_the_gate_is_traced_whole(layer: Any, ops: list[str]) -> None:
    """torch.compile sees through every check: a graph break would end a compilation of vLLM's."""
    import torch

    def traced() -> Any:
        torch._dynamo.reset()
        return torch.compile(layer, backend="eager", fullgraph=True)(*inputs())

    stock = traced()
    with applied(ID):
        made = traced()
    assert torch.equal(made[0], stock[0]) and torch.equal(made[1], stock[1])


# -- where it is planned


def test_a_model_without_measured_norms_hears_why_not(tmp_path: Path) -> None:
    from overlay.facts import Model
    from overlay.runtime import set_options

    other = replace(H200, hardware=replace(H200.hardware, name="Another Part"))
    assert "overlay tune MODEL" in normed_layer_qwen3.no_entry(other)
    assert normed_layer_qwen3.no_entry(replace(H200, model=Model())) is None  # the process knows
    (shipped,) = table.SHIPPED.glob("*.json")
    entry = table.Normed(
        "bfloat16", 1, 6144, 2560, False, table.Tile("rows", 4, 512), None, us=1.0, apart_us=2.0, limit_us=1.0
    )
    own = replace(table.load(shipped), devices=("Another Part",), normed={entry.key: entry})
    table.save(own, tmp_path / "own.json")
    set_options("gemm-tiles", {"tables": str(tmp_path)})
    try:
        assert normed_layer_qwen3.no_entry(other) is None
        assert normed_layer_qwen3.no_entry(replace(other, model=replace(other.model, hidden_size=1000)))
    finally:
        set_options("gemm-tiles", {})


def test_a_table_keeps_its_normed_entries_and_refuses_wrong_ones(tmp_path: Path) -> None:
    (shipped,) = table.SHIPPED.glob("*.json")
    tile, second = table.Tile("rows", 4, 512, trigger=True), table.Tile("rows", 1, 1024, 4, pdl=True, early=True)
    entries = [
        table.Normed("bfloat16", 2, 6144, 2560, False, tile, None, us=1.0, apart_us=2.0, limit_us=1.0),
        table.Normed("bfloat16", 1, 6144, 2560, True, tile, second, us=1.0, apart_us=2.0, limit_us=1.0),
    ]
    path = tmp_path / "a.json"
    made = replace(table.load(shipped), normed={entries[0].key: entries[0]}, normed_mlps={entries[1].key: entries[1]})
    table.save(made, path)
    read = table.load(path)
    assert (read.normed, read.normed_mlps) == (made.normed, made.normed_mlps)
    for values, message in [
        ({"m": 3}, "for one or two rows"), ({"us": 2.0}, "no gain over apart's"), ({"gated": 1}, "gated is 1"),
        ({"tile": {"kernel": "lanes", "bn": 8, "bk": 64}}, "kernel 'rows' alone"),
        ({"tile": {"kernel": "rows", "bn": 8, "bk": 64, "split": 2}}, "unsplit"), ({"second": 3}, "second: expected an object"),
    ]:  # fmt: skip
        content = json.loads(path.read_text())
        content["normed"][0] |= values
        (tmp_path / "wrong.json").write_text(json.dumps(content))
        with pytest.raises(table.TableError, match="normed 1") as error:
            table.load(tmp_path / "wrong.json")
        assert message in str(error.value)
