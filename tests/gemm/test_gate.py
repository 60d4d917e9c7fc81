"""Whether a start may use gemm-tiles at all, what it says where settings leave it off, and what the patch replaces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from overlay.catalog import load_catalog
from overlay.facts import Build, Facts, Hardware, Model, Serving
from overlay.fingerprint import from_source
from patches._lib.gemm import summary, table
from patches.common import gemm_tiles
from tests.support import CACHE, applied

RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")
QWEN3_4B = Model(
    dtype="bfloat16", hidden_size=2560, intermediate_size=9728, num_layers=36, num_attention_heads=32, num_kv_heads=8,
    head_dim=128, vocab_size=151936, moe=False, hybrid=False,
)  # fmt: skip
H200 = Facts(
    build=Build(triton="3.6.0"), hardware=Hardware(platform="cuda", arch="sm90", name="NVIDIA H200", sms=132), model=QWEN3_4B,
    serving=Serving(tensor_parallel=1),
)  # fmt: skip


def test_a_measured_card_may_use_it() -> None:
    assert gemm_tiles.unusable(H200) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(H200, hardware=replace(H200.hardware, name="NVIDIA H100 80GB HBM3")), "this is NVIDIA H100 80GB HBM3"),
        (replace(H200, hardware=replace(H200.hardware, sms=16)), "here are 16"),
        (replace(H200, build=Build(triton="3.5.1")), "measured with Triton 3.6.0, this is 3.5.1"),
        (replace(H200, hardware=Hardware(platform="dcu", arch="gfx936", name="BW1000", sms=80)), "overlay tune MODEL"),
        (replace(H200, serving=Serving(batch_invariant=True)), "batch-invariant"),
        (replace(H200, env={"VLLM_BATCH_INVARIANT": "1"}), "batch-invariant"),
    ],
)
def test_every_other_start_hears_why_not(facts: Facts, reason: str) -> None:
    assert reason in gemm_tiles.unusable(facts)


def test_a_start_that_leaves_it_off_hears_what_was_measured_and_the_flag() -> None:
    line = gemm_tiles.measured_gain(H200)
    assert "NVIDIA H200 with Qwen3-4B" in line and "--overlay-exactness rounding" in line and "\n" not in line
    records = {record["model"]["name"]: record for record in summary.served()}
    assert f"{records['Qwen3-4B']['without_ms']:.2f} -> {records['Qwen3-4B']['with_ms']:.2f} ms" in line


def test_a_model_that_was_not_served_hears_of_its_products_alone() -> None:
    model = replace(QWEN3_4B, hidden_size=4096, intermediate_size=12288)
    line = gemm_tiles.measured_gain(replace(H200, model=model))
    assert "not measured in service" in line and "of its 5 one-row products" in line
    assert gemm_tiles.measured_gain(replace(H200, model=replace(model, hidden_size=1000))) is None
    assert "Qwen3-4B" not in (gemm_tiles.measured_gain(replace(H200, serving=Serving(tensor_parallel=2))) or "")


def test_another_card_hears_nothing() -> None:
    assert gemm_tiles.measured_gain(replace(H200, hardware=replace(H200.hardware, name="NVIDIA H100 80GB HBM3"))) is None


def test_shipped_tables_use_no_programmatic_launch() -> None:
    for path in table.SHIPPED.glob("*.json"):
        assert not any(entry.tile.pdl for entry in table.load(path).entries.values())


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_the_replaced_functions_are_the_verified_ones_in_every_release(release: str) -> None:
    root = CACHE / "src" / f"vllm-{release}"
    if not root.is_dir():
        pytest.skip(f"the sources of vLLM {release} are not here")
    for target in load_catalog(())["gemm-tiles"].patch.targets:
        assert from_source(root, target.module, target.qualname) == target.fingerprints[f"vllm {release}"]


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_every_release_asks_the_replaced_functions_by_their_global_name(release: str) -> None:
    """``dispatch_unquantized_gemm`` returns them by global look-up; one model imports one of them by name, later."""
    root = CACHE / "src" / f"vllm-{release}" / "vllm"
    if not root.is_dir():
        pytest.skip(f"the sources of vLLM {release} are not here")
    text = (root / "model_executor" / "layers" / "utils.py").read_text()
    dispatch = text[text.index("def dispatch_unquantized_gemm") :]
    assert "return default_unquantized_gemm" in dispatch and "return rocm_unquantized_gemm" in dispatch
    importers = {
        path.relative_to(root).as_posix()
        for path in Path(root).rglob("*.py")
        if "import default_unquantized_gemm" in (source := path.read_text(errors="ignore"))
        or "import rocm_unquantized_gemm" in source
    }
    # it binds the name after the patch is in force, and calls it with the same arguments
    assert importers <= {"model_executor/models/gpt_oss.py"}


def test_on_a_cpu_the_original_runs_and_its_layer_is_handed_through() -> None:
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("vllm.model_executor.layers.utils")
    x, w = torch.randn(2, 8, dtype=torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)
    stock = utils.default_unquantized_gemm
    with applied("gemm-tiles"):
        assert utils.default_unquantized_gemm is not stock
        assert torch.equal(utils.default_unquantized_gemm(None, x, w), torch.nn.functional.linear(x, w))
    assert utils.default_unquantized_gemm is stock
