"""The choice at run time: what gets a kernel, what stays with the original and why, and that the answer is right.

Kernels run in Triton's interpreter on the CPU, in a process of their own: the interpreter is chosen when Triton is
imported.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gemm.interpreter import output

SCRIPT = r"""
import json, sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
from overlay.ledger import Counters
from overlay.runtime import set_options
from patches._lib.gemm import dispatch, table

folder = sys.argv[1]
tiles = {1: table.Tile("rows", 4, 32), 5: table.Tile("lanes", 8, 32, slices=2), 16: table.Tile("tiles", 16, 32)}
entries = [table.Entry("float16", m, 24, 64, tile=tile, us=1.0, original_us=2.0, limit_us=0.5) for m, tile in tiles.items()]
entries = {entry.key: entry for entry in entries}
found = table.Table("", "sm90", ("Chip",), 7, "3.6.0", "t", "d", "2026-01-01", 1.0, 0.02, "", entries)
table.save(found, folder + "/chip.json")
dispatch.device_of = lambda index: table.Device("sm90", "Chip", 7, "3.6.0+vendor")
set_options("test-patch", {"tables": folder} | json.loads(sys.argv[2]))
count = Counters("test-patch")
calls = []

def original(x, weight, bias):
    calls.append(tuple(x.shape))
    return torch.nn.functional.linear(x, weight, bias)

chooser = dispatch.Chooser("test-patch", count)
registered = {}
dispatch.register = lambda name, function, fake: registered.setdefault(name, (function, fake))[0]
op = dispatch.linear_op("test_gemm", chooser, original)
weight, bias = (torch.randn(24, 64) * 0.1).half(), torch.randn(24).half()
report = []
for name, x, w, b in [
    ("prefill", torch.randn(40, 64).half(), weight, None),
    ("one row", torch.randn(1, 64).half(), weight, None),
    ("one row, bias", torch.randn(1, 64).half(), weight, bias),
    ("five rows", torch.randn(5, 64).half(), weight, bias),
    ("sixteen rows, strided", torch.randn(16, 128).half()[:, :64], weight, None),
    ("four rows", torch.randn(4, 64).half(), weight, None),
    ("other dtype", torch.randn(1, 64).bfloat16(), weight.bfloat16(), None),
    ("other shape", torch.randn(1, 32).half(), weight[:, :32].contiguous(), None),
    ("weight with gaps", torch.randn(1, 64).half(), torch.randn(24, 128).half()[:, :64], None),
    ("every other column", torch.randn(5, 128).half()[:, ::2], weight, None),
    ("transposed x", torch.randn(64, 5).half().t(), weight, None),
    ("three dimensions", torch.randn(1, 5, 64).half(), weight, None),
    ("bias of another dtype", torch.randn(1, 64).half(), weight, bias.float()),
]:
    calls.clear()
    try:
        y = op(x, w, b)
    except RuntimeError:  # torch's own refusal of the mixed dtypes
        report.append((name, len(calls), None, None))
        continue
    reference = x.double() @ w.double().T + (0 if b is None else b.double())
    error = ((y.double() - reference).norm() / reference.norm()).item()
    fake = registered["test_gemm"][1](x, w, b)
    report.append((name, len(calls), error, list(y.shape) == list(fake.shape) and y.dtype == fake.dtype))
print(json.dumps({"report": report, "counts": count.all()}))
"""


def run(tmp_path: Path, **options: object) -> dict:
    return json.loads(output(SCRIPT, str(tmp_path), json.dumps(options))[-1])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run(tmp_path_factory.mktemp("tables"))


def test_measured_rows_take_the_kernel_and_everything_else_the_original(outcome: dict) -> None:
    originals = {name: calls for name, calls, _, _ in outcome["report"]}
    assert [name for name, calls in originals.items() if not calls] == [
        "one row",
        "one row, bias",
        "five rows",
        "sixteen rows, strided",
    ]


def test_every_answer_is_the_product_in_double_precision(outcome: dict) -> None:
    for name, _, error, _ in outcome["report"]:
        assert error is None or error < (1e-2 if name == "other dtype" else 1e-3), name


def test_the_fake_op_says_the_shape_and_dtype_of_the_real_one(outcome: dict) -> None:
    assert all(same for _, _, error, same in outcome["report"] if error is not None)


def test_hits_are_counted_by_shape_and_refusals_by_reason(outcome: dict) -> None:
    counts = outcome["counts"]
    assert counts["hit 1x24x64"] >= 2 and counts["hit 5x24x64"] == 1 and counts["hit 16x24x64"] == 1
    assert counts["refused: more rows than the kernels take"] == 1
    assert counts["refused: rows not in the table"] == 1
    assert counts["refused: shape not in the table"] == 2
    assert counts["refused: layout"] == 3
    assert counts["refused: not two-dimensional"] == 1
    assert counts["refused: bias layout"] == 1


def test_max_rows_keeps_larger_batches_with_the_original(tmp_path: Path) -> None:
    found = run(tmp_path, max_rows=4)
    assert [name for name, calls, _, _ in found["report"] if not calls] == ["one row", "one row, bias"]
