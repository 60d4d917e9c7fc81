"""The one-launch argmax in Triton's interpreter, against ``torch.argmax`` of the same rows in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = r"""
import json, random
import torch
torch.set_num_threads(1)
from patches._lib import argmax

argmax.PART = 32
INF, NAN = float("inf"), float("nan")

def rows(rnd, number, vocabulary, kind):
    generator = torch.Generator().manual_seed(rnd.randrange(1 << 30))
    values = torch.randn(number, vocabulary, generator=generator)
    spots = lambda: [rnd.randrange(vocabulary) for _ in range(3)]
    for row in values:
        if kind == "ties":
            row.copy_((row * 2).round() / 2)
        elif kind == "equal":
            row.fill_(rnd.choice((-3.0, 0.0, 7.0, INF, -INF)))
        elif kind == "zeros":  # nothing but zeros of both signs, and smaller values before them
            row.copy_(torch.where(row > 0, 0.0, -0.0))
            row[: rnd.randrange(vocabulary)] = -1e-30
        elif kind == "infinities":
            row[spots()] = INF
            row[spots()] = -INF
        elif kind == "nan":
            row[spots()] = INF
            row[spots()] = NAN
        elif kind == "negative nan":
            row[spots()] = -torch.tensor(NAN)
        elif kind == "tiny":
            row.mul_(1e-39)  # bf16: subnormal numbers; fp16: zeros of both signs
        elif kind == "negative":
            row.copy_(-row.abs() - 1)
    return values

found = {"cases": 0, "wrong": [], "dirty": 0, "kinds": {}}
for seed in range(180):
    rnd = random.Random(seed)
    kind = ("normal", "ties", "equal", "zeros", "infinities", "nan", "negative nan", "tiny", "negative")[seed % 9]
    number, vocabulary = rnd.choice((1, 1, 2, 3, 8)), rnd.choice((1, 2, 31, 32, 33, 64, 97, 211))
    dtype = rnd.choice((torch.bfloat16, torch.float16))
    logits = rows(rnd, number, vocabulary, kind).to(dtype)
    if seed % 3 == 1:  # rows further apart than they are long
        wide = torch.full((number, vocabulary + rnd.randrange(1, 9)), INF, dtype=dtype)
        wide[:, :vocabulary] = logits
        logits = wide[:, :vocabulary]
    elif seed % 3 == 2 and number > 1:  # the same row again and again
        logits = logits[:1].expand(number, vocabulary)
    assert argmax.takes(logits)
    mine = argmax.argmax(logits)
    assert mine.dtype is torch.int32 and mine.shape == (number, 1) and mine.is_contiguous()
    found["cases"] += 1
    found["kinds"][kind] = found["kinds"].get(kind, 0) + 1
    if mine.flatten().tolist() != logits.float().argmax(-1).tolist():
        found["wrong"].append([seed, kind, str(dtype), number, vocabulary])
    found["dirty"] += int(any(bool(w.any()) for w in argmax._workspaces.values()))
found["workspaces"] = len(argmax._workspaces)

logits = rows(random.Random(1), 4, 70, "normal").to(torch.bfloat16)
first = argmax.argmax(logits)
kept = first.clone()
logits.neg_()
second = argmax.argmax(logits)
found["fresh"] = first.data_ptr() != second.data_ptr() and torch.equal(first, kept) and not torch.equal(first, second)
own = torch.zeros(4, 2, dtype=torch.int64)
found["own workspace"] = torch.equal(argmax.argmax(logits, own), second) and not own.any().item()
found["refused"] = {
    "float32": argmax.takes(logits.float()),
    "too many rows": argmax.takes(logits[:1].expand(65, 70)),
    "no rows": argmax.takes(logits[:0]),
    "columns": argmax.takes(logits.t()),
    "one dimension": argmax.takes(logits[0]),
}
print(json.dumps(found))
"""


def interpreted(script: str) -> dict:
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> dict:
    return interpreted(SCRIPT)


def test_every_row_gives_torchs_token(found: dict) -> None:
    """Ties, infinities, NaN, zeros of both signs, subnormal numbers, odd vocabularies, strided rows."""
    assert found["cases"] == 180 and min(found["kinds"].values()) == 20
    assert found["wrong"] == []


def test_the_workspace_is_zero_after_each_launch(found: dict) -> None:
    assert found["dirty"] == 0 and found["workspaces"] == 1
    assert found["own workspace"]


def test_tokens_of_the_launch_before_stay(found: dict) -> None:
    assert found["fresh"]


def test_other_logits_are_refused(found: dict) -> None:
    assert not any(found["refused"].values()), found["refused"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(0x7FFFFFFF - index).to(tl.int64)", "index.to(tl.int64)"),  # the highest index among equals
        ("tl.where(bits < 0, -magnitude, magnitude)", "tl.where(bits < 0, -magnitude - 1, magnitude)"),  # -0.0 below 0.0
        ("tl.where(magnitude > INFINITY, 0x8000, order)", "order"),  # NaN by its sign
        # the last part's best, not the row's
        ("best = tl.atomic_xchg(workspace + row * 2, 0", "tl.atomic_xchg(workspace + row * 2, 0"),
    ],
)
def test_the_comparison_sees_a_wrong_kernel(tmp_path: Path, right: str, wrong: str) -> None:
    """Each property of the kernel, broken on purpose, is found."""
    source = (ROOT / "patches" / "_lib" / "argmax.py").read_text()
    assert source.count(right) == 1
    (tmp_path / "broken.py").write_text(source.replace(right, wrong))
    script = SCRIPT.replace(
        "from patches._lib import argmax", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport broken as argmax"
    ).replace('found["own workspace"] =', "found['skipped'] =").replace("range(180)", "range(54)")
    assert interpreted(script)["wrong"]
