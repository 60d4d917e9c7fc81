"""The kernels against float64, in Triton's interpreter: every kernel, awkward sizes, bias, strides, splits, equal bits.

The interpreter multiplies bf16 tensor-core tiles wrongly (it takes the bits for integers), so that those run in fp16 here; both
dtypes ran on the GPU (ab_runs/results/gemm).
"""

from __future__ import annotations

import json

import pytest

from tests.gemm.interpreter import output

SCRIPT = r"""
import json
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
from patches._lib.gemm import kernels
from patches._lib.gemm.table import Tile

CASES = [
    (1, 37, 200, Tile("rows", 4, 64)), (1, 8, 256, Tile("rows", 8, 256)), (2, 16, 256, Tile("rows", 4, 128, stages=2)),
    (3, 20, 130, Tile("rows", 2, 64, split=2)), (4, 33, 100, Tile("rows", 8, 32)), (5, 33, 300, Tile("lanes", 8, 32, slices=4)),
    (16, 24, 512, Tile("lanes", 8, 64, slices=2, split=2)), (2, 17, 96, Tile("lanes", 16, 16, slices=2)),
    (8, 70, 200, Tile("tiles", 64, 64, narrow=True)), (16, 128, 256, Tile("tiles", 64, 64, split=2)),
    (1, 64, 64, Tile("tiles", 64, 64)),
    (11, 40, 1000, Tile("tiles", 16, 128, split=4)),
]
for rows, n, k, tile in CASES:
    for dtype in (torch.bfloat16, torch.float16) if tile.kernel == "rows" else (torch.float16,):
        for with_bias in (False, True):
            x = torch.randn(rows, k + 8).to(dtype)[:, :k]
            w = (torch.randn(n, k + 16) * 0.1).to(dtype)[:, :k]
            bias = torch.randn(n).to(dtype) if with_bias else None
            ys = [kernels.run(tile, x, w, bias, out=torch.full((rows, n), float("nan"), dtype=dtype)) for _ in "ab"]
            reference = x.double() @ w.double().T + (bias.double() if with_bias else 0)
            error = ((ys[0].double() - reference).norm() / reference.norm()).item()
            case = f"{rows}x{n}x{k} {tile} {dtype} {with_bias}"
            print(json.dumps({"case": case, "error": error, "same": torch.equal(*ys), "half": str(dtype)}))
            if n % 2:
                continue
            ys = [kernels.run(tile, x, w, bias, torch.full((rows, n // 2), float("nan"), dtype=dtype), True) for _ in "ab"]
            gate, up = reference.to(dtype).double().chunk(2, -1)
            reference = gate * torch.sigmoid(gate) * up
            error = ((ys[0].double() - reference).norm() / reference.norm()).item()
            print(json.dumps({"case": f"gated {case}", "error": error, "same": torch.equal(*ys), "half": str(dtype)}))

# the norm inside the product, and the norm by itself
for rows, n, k, tile in [(1, 37, 200, Tile("rows", 4, 64)), (2, 16, 256, Tile("rows", 2, 128, stages=2)),
                         (1, 8, 96, Tile("rows", 8, 256)), (2, 6, 130, Tile("rows", 1, 64))]:
    for dtype in (torch.bfloat16, torch.float16):
        x, residual = torch.randn(rows, k).to(dtype), (torch.randn(rows, k) * 3).to(dtype)
        gamma, w = (torch.randn(k) * 0.1 + 1).to(dtype), (torch.randn(n, k + 16) * 0.1).to(dtype)[:, :k]
        both = x.double() + residual.double()
        norm = both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma.double()
        y, kept = kernels.add_norm(x, residual, gamma, 1e-6)
        found = {"alone": (y, kept, norm)}
        for gated in (False, True):
            if gated and (n % 2 or tile.bn < 2):
                continue
            ys = [kernels.run_normed(tile, x, residual, gamma, 1e-6, w, gated) for _ in "ab"]
            reference = norm @ w.double().T
            if gated:
                gate, up = reference.to(dtype).double().chunk(2, -1)
                reference = gate * torch.sigmoid(gate) * up
            found[f"gated={gated}"] = (ys[0][0], ys[0][1], reference)
            assert torch.equal(ys[0][0], ys[1][0])
        for name, (y, sum_, reference) in found.items():
            error = ((y.double() - reference).norm() / reference.norm()).item()
            # the sum is rounded once: as exact as its dtype allows
            same = ((sum_.double() - both).abs() <= both.abs() * (2**-7 if dtype is torch.bfloat16 else 2**-10)).all().item()
            print(json.dumps({"case": f"norm {name} {rows}x{n}x{k} {tile} {dtype}", "error": error, "same": same,
                              "half": str(dtype)}))
"""


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return [json.loads(line) for line in output(SCRIPT)]


def test_every_kernel_is_the_product_with_bias_strides_and_ragged_sizes(results: list[dict]) -> None:
    assert len(results) == 56 + 20  # 34 plain, 22 of an even N gated; 8 norms, 12 in front of products
    for result in results:  # bf16 keeps 8 bits, and the interpreter truncates to them where a device rounds
        limit = 1e-2 if "bfloat16" in result["half"] else 1e-3
        assert result["error"] < limit, result["case"]  # NaN, from an element that was not written, fails too


def test_equal_inputs_give_equal_bits(results: list[dict]) -> None:
    assert all(result["same"] for result in results)
