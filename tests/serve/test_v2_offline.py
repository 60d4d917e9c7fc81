"""The V2 runner under the launcher, on a CPU (its kernels in Triton's interpreter): another program than the server, so that
which runner comes up, and with which model, is known in the worker only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlay.ledger import read_run
from tests.server import CHECKPOINT, ENVIRONMENT
from tests.support import ROOT

pytestmark = pytest.mark.serve

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[2])
import tests.testbeds.v2_on_cpu
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=512, gpu_memory_utilization=0.15, max_num_seqs=4)
    prompts = ["The capital of France is", "one two three one two three one", "def add(a, b):"]
    mixes = [SamplingParams(temperature=0, max_tokens=20), SamplingParams(temperature=0, max_tokens=20, min_tokens=20),
             SamplingParams(temperature=0, max_tokens=12, frequency_penalty=0.5, logprobs=2)]
    outputs = llm.generate(prompts, mixes) + llm.generate(prompts[:1], mixes[:1])
    print("IDS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""
IDS = ("sampler-staged-writes", "decision-cache")


def run(folder: Path, *flags: str) -> list[list[int]]:
    script = folder / "offline.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(ROOT / "launch.py"), *flags, "--overlay-exec", "--"]
    command += [sys.executable, str(script), str(CHECKPOINT), str(ROOT)]
    environ = {**os.environ, **ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("IDS"))[4:])


def test_the_v2_runners_patches_are_proven_in_another_program_and_its_answers_are_stocks(tmp_path: Path):
    stock = run(tmp_path, "--overlay-config", str(ROOT / "configs/off.yaml"))
    wanted = ",".join(f"+{name}" for name in IDS)
    assert run(tmp_path, "--overlay-patches", wanted, "--overlay-run-dir", str(tmp_path / "run")) == stock
    receipts, counters = read_run(str(tmp_path / "run"))
    worker = next(receipt for receipt in receipts if "worker" in receipt["role"])
    assert worker["runner"] == "V2"
    for name in IDS:
        assert worker["patches"][name]["verified"] is True, worker["patches"][name]
        hits = [count for event, count in counters[worker["pid"]][name].items() if event.startswith("hit")]
        assert sum(hits) > 10, counters
    # the V1 runner's patches, in force until it turned out which runner came up, were taken back
    assert worker["patches"].get("block-table-dirty", {}).get("state") in (None, "failed", "waiting")
