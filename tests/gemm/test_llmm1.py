"""Rows per block: what reaches the op, on the real vLLM functions, with the op itself replaced by a recorder."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from overlay.facts import Build, Facts, Hardware
from tests.support import CACHE, applied

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

calls: list[tuple[tuple[int, ...], int]] = []


@pytest.fixture(scope="module", autouse=True)
def recorder() -> object:
    """``torch.ops._rocm_C.LLMM1`` as this machine has none: records its arguments."""
    library = torch.library.Library("_rocm_C", "FRAGMENT")
    library.define("LLMM1(Tensor a, Tensor b, int rows_per_block) -> Tensor")

    def recorded(a: torch.Tensor, b: torch.Tensor, rows_per_block: int) -> torch.Tensor:
        calls.append((tuple(a.shape), rows_per_block))
        return b.new_zeros(b.shape[0], a.shape[0])

    library.impl("LLMM1", recorded, "CPU")
    yield library


@pytest.fixture
def patch_module(monkeypatch: pytest.MonkeyPatch) -> object:
    from patches.rocm import llmm1_rows_per_block as module

    monkeypatch.setattr(module, "architecture", lambda: "gfx936")
    monkeypatch.setattr(module, "_here", None)
    calls.clear()
    return module


def product(out: int, width: int, rows: int = 4) -> torch.Tensor:
    import vllm._custom_ops as ops

    weight, x = torch.ones(1, 1, dtype=torch.bfloat16).expand(out, width), torch.ones(1, width, dtype=torch.bfloat16)
    return ops.LLMM1(weight, x, rows)


@pytest.mark.parametrize("out", [14336, 16384, 34816])
def test_the_three_measured_shapes_get_two_rows_per_block(patch_module: object, out: int) -> None:
    with applied("llmm1-rows-per-block"):
        product(out, 5120)
    product(out, 5120)
    assert calls == [((out, 5120), 2), ((out, 5120), 4)]


@pytest.mark.parametrize(
    ("out", "width", "rows"), [(96, 5120, 4), (14336, 2560, 4), (5120, 14336, 4), (4096, 4096, 8), (8, 5120, 16)]
)
def test_other_shapes_keep_what_the_caller_passed(patch_module: object, out: int, width: int, rows: int) -> None:
    with applied("llmm1-rows-per-block"):
        product(out, width, rows)
    assert calls == [((out, width), rows)]


def test_another_chip_keeps_what_the_caller_passed(patch_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_module, "architecture", lambda: "gfx942")
    with applied("llmm1-rows-per-block"):
        product(14336, 5120)
    assert calls == [((14336, 5120), 4)]


def test_the_real_dispatch_reaches_the_patched_op(patch_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's own dispatch gives LLMM1 the small products only: they pass through the patch untouched."""
    import vllm.model_executor.layers.utils as utils

    chip = types.ModuleType("vllm.platforms.rocm")
    for name, value in {"on_gfx9": True, "on_gfx1x": False, "on_gfx11": False, "on_gfx950": False, "on_gfx1250": False}.items():
        setattr(chip, name, lambda value=value: value)
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", chip)
    monkeypatch.setattr(utils, "num_compute_units", lambda: 64)
    monkeypatch.setattr(utils, "use_aiter_triton_gemm", lambda *_: False)
    split = []
    monkeypatch.setattr(utils.ops, "wvSplitK", lambda weight, x, *_: split.append(tuple(weight.shape)) or x @ weight.T)
    x = torch.ones(1, 512, dtype=torch.bfloat16)
    before = patch_module.count.get("refused: shape not in the table")
    with applied("llmm1-rows-per-block"):
        for out in (8, 16):
            utils.rocm_unquantized_gemm_impl(x, torch.ones(out, 512, dtype=torch.bfloat16))
    assert calls == [((8, 512), 4)] and split == [(16, 512)]
    assert patch_module.count.get("refused: shape not in the table") == before + 1


def facts(root: Path) -> Facts:
    return Facts(build=Build(root=str(root)), hardware=Hardware(platform="dcu", arch="gfx936"))


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0"])
def test_the_plan_says_that_the_op_is_lacking_or_never_asked(tmp_path: Path, release: str) -> None:
    from patches.rocm.llmm1_rows_per_block import never_reached

    source = CACHE / "src" / f"vllm-{release}" / "vllm"
    if not source.is_dir():
        pytest.skip(f"the sources of vLLM {release} are not here")
    assert "lacks the op" in never_reached(facts(source))
    layers = tmp_path / "vllm" / "model_executor" / "layers"
    layers.mkdir(parents=True)
    for package in (tmp_path / "vllm", tmp_path / "vllm" / "model_executor", layers):
        (package / "__init__.py").touch()
    text = (source / "model_executor" / "layers" / "utils.py").read_text()
    (layers / "utils.py").write_text(text)
    (tmp_path / "vllm" / "_rocm_C.abi3.so").write_bytes(b"\x7fELF...LLMM1...")
    assert "never asked" in never_reached(facts(tmp_path / "vllm"))
    (layers / "utils.py").write_text(text.replace("m > 8", "m > 800000"))
    assert never_reached(facts(tmp_path / "vllm")) is None
    (layers / "utils.py").write_text(text.replace("LLMM1", "LLMM2"))
    assert "never calls LLMM1" in never_reached(facts(tmp_path / "vllm"))
