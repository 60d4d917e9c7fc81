"""vLLM's own layers of one rank, with and without LoRA around them: their products reach the kernels of the table, under the
shapes that the tuner would measure, and LoRA adds to what a kernel returned as to what the original did.

The layers, the dispatch and the choice are real. Only the launch is replaced, by the same product on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches._lib.gemm.shapes import products
from tests.support import applied

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.lora.layers")

CONFIG = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 500,
}  # fmt: skip
PACKED = {"attention qkv": ["q_proj", "k_proj", "v_proj"], "gate_up": ["gate_proj", "up_proj"]}
ROWS = (1, 3)
RANK = 8


class OnCard(torch.Tensor):
    """A CPU tensor that says it is on a GPU: the patch hands others to the original."""

    is_cuda = True


def rows_of(count: int, width: int) -> Any:
    return torch.randn(count, width, dtype=torch.bfloat16).as_subclass(OnCard)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, Any]]]:
    """Makes the layers of rank ``rank`` of ``tp`` by the names that ``products`` gives them, with the same weights each time.

    To be called where a patch is in force: from 0.32 on a layer picks its function when it is made.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.lora.layers import logits_processor
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    # the platform of these tests has a dispatch of its own; what it would be on NVIDIA is asked for here
    nvidia = SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(utils, "current_platform", nvidia)

    def make(tp: int = 1, rank: int = 0) -> dict[str, Any]:
        torch.manual_seed(0)
        for module in (linear, parameter, vocab_parallel_embedding, logits_processor):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: tp)
        hidden, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
        heads, kv = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
        plain = {"bias": False, "params_dtype": torch.bfloat16}
        alone = plain | {"reduce_results": False}  # the other ranks are not here
        made = {
            "attention qkv": linear.QKVParallelLinear(hidden, head, heads, kv, **plain),
            "attention o": linear.RowParallelLinear(heads * head, hidden, **alone),
            "gate_up": linear.MergedColumnParallelLinear(hidden, [inner, inner], **plain),
            "down": linear.RowParallelLinear(inner, hidden, **alone),
            "lm_head": vocab_parallel_embedding.ParallelLMHead(CONFIG["vocab_size"], hidden, params_dtype=torch.bfloat16),
        }
        for layer in made.values():
            layer.weight.data.normal_().mul_(0.1)
        return made

    with set_current_vllm_config(VllmConfig()):
        yield make


@contextmanager
def tiles(folder: Path, monkeypatch: pytest.MonkeyPatch, tp: int) -> Iterator[list[tuple[int, int, int]]]:
    """gemm-tiles in force with a table of the rank's products; yields the (rows, n, k) that a kernel was launched for."""
    from patches._lib.gemm import dispatch, kernels, table

    device = table.Device("sm90", "Chip", 7, "3.6.0")
    measured = {"tile": table.Tile("rows", 4, 32), "us": 1.0, "original_us": 2.0, "limit_us": 0.5}
    shapes = {(product.n, product.k) for product in products(CONFIG, tp)}
    entries = [table.Entry("bfloat16", rows, n, k, **measured) for n, k in shapes for rows in ROWS]
    content = table.Table(
        "", device.arch, (device.name,), device.sms, device.triton, "t", "d", "2026-01-01", 1.0, 0.02, "",
        {entry.key: entry for entry in entries},
    )  # fmt: skip
    table.save(content, folder / "chip.json")
    launched: list[tuple[int, int, int]] = []

    def run(tile: Any, x: Any, w: Any, bias: Any = None) -> Any:
        if x.any():  # what a shape is prepared with is zeros
            launched.append((x.shape[0], w.shape[0], x.shape[1]))
        return torch.nn.functional.linear(x, w, bias)

    monkeypatch.setattr(dispatch, "device_of", lambda index: device)
    monkeypatch.setattr(dispatch, "register", lambda name, function, fake: function)
    monkeypatch.setattr(kernels, "run", run)
    monkeypatch.setattr(kernels, "warm", lambda *args: None)
    with applied("gemm-tiles", tables=str(folder)):
        yield launched


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_a_ranks_layers_are_the_tuned_products(layers: Any, tmp_path: Path, monkeypatch: Any, tp: int, rank: int) -> None:
    """At TP 4 the two KV heads are on two ranks each."""
    expected = {product.name: (product.n, product.k) for product in products(CONFIG, tp)}
    with tiles(tmp_path, monkeypatch, tp) as launched:
        made = layers(tp, rank)
        assert {name: tuple(layer.weight.shape) for name, layer in made.items()} == expected
        for name, layer in made.items():
            n, k = expected[name]
            for rows in (*ROWS, 5):
                launched.clear()
                y = layer.quant_method.apply(layer, rows_of(rows, k), None)
                assert y.shape == (rows, n)
                assert launched == ([(rows, n, k)] if rows in ROWS else []), name


def punica(rows: int) -> Any:
    """Every row of the batch with the one adapter."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper = PunicaWrapperCPU(16, 16, "cpu")
    wrapper.update_metadata(LoRAMapping((1,) * rows, (1,) * rows, is_prefill=True), [1], 1, CONFIG["vocab_size"])
    return wrapper


def lora_config() -> Any:
    from vllm.config.lora import LoRAConfig

    return LoRAConfig(max_lora_rank=RANK, max_loras=1, lora_dtype=torch.bfloat16)


def random(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["attention qkv", "attention o", "gate_up", "down"])
def test_lora_adds_to_what_a_kernel_returned(layers: Any, tmp_path: Path, monkeypatch: Any, name: str, rows: int) -> None:
    from vllm.lora.utils import from_layer

    def answers() -> tuple[Any, ...]:
        """The base layer's answer, and that with the adapter, twice: LoRA writes into what the kernel returned."""
        layer, parts = layers()[name], PACKED.get(name, [])
        wrapped = from_layer(layer, 1, lora_config(), parts)
        sizes = [b.shape[2] for b in wrapped.lora_b_stacked]
        k = layer.weight.shape[1]
        a, b = [random(RANK, k) for _ in sizes], [random(size, RANK) for size in sizes]
        wrapped.set_lora(0, a if parts else a[0], b if parts else b[0])
        wrapped.set_mapping(punica(rows))
        x = rows_of(rows, k)
        return layer.quant_method.apply(layer, x, None), wrapped(x)[0], wrapped(x)[0]

    stock = answers()
    assert not torch.equal(stock[0], stock[1])
    with tiles(tmp_path, monkeypatch, 1) as launched:
        patched = answers()
    shape = next((product.n, product.k) for product in products(CONFIG) if product.name == name)
    assert launched == [(rows, *shape)] * 3
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(patched, stock, strict=True))


def test_logits_with_lora_come_from_the_kernel(layers: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from vllm.lora.utils import from_layer_logits_processor
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    monkeypatch.setattr(LogitsProcessor, "_gather_logits", lambda self, logits: logits)  # one rank: nothing to gather
    vocab = CONFIG["vocab_size"]

    def logits() -> Any:
        head = layers()["lm_head"]
        k = head.weight.shape[1]
        wrapped = from_layer_logits_processor(LogitsProcessor(vocab), head, 1, lora_config())
        wrapped.set_lora(0, random(RANK, k), random(vocab, RANK))
        wrapped.set_mapping(punica(3))
        return wrapped(head, rows_of(3, k))

    stock = logits()
    with tiles(tmp_path, monkeypatch, 1) as launched:
        patched = logits()
    assert launched == [(3, 512, CONFIG["hidden_size"])]
    assert patched.shape == (3, vocab) and torch.equal(patched, stock)
