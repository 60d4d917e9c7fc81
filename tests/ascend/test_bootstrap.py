"""The overlay's hooks and vllm-ascend's own patch chain in one worker, under the real bootstrap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ascend

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ON = (
    "ascend-host-slot-mapping",
    "ascend-gdn-joint-norm",
    "ascend-gemma-norm-weight",
    "ascend-mamba-copy-overlap",
    "ascend-shared-expert-stream",
    "ascend-attention-prefetch",
    "ascend-cos-sin-once",
)


def _orders(folder):
    """Every code patch of the set that can be on together, from the plan of the 910C facts file."""
    from overlay.catalog import load_catalog
    from overlay.config import user_settings, with_profile
    from overlay.facts_file import read
    from overlay.plan import make_plan, orders

    text = (HERE / "data" / "910c-qwen3.5-35b-a3b.yaml").read_text(encoding="utf-8")
    facts = folder / "facts.yaml"  # synchronous and not multimodal, so that every patch has its conditions
    facts.write_text(
        text.replace("async_scheduling: true", "async_scheduling: false").replace("multimodal: true", "multimodal: false"),
        encoding="utf-8",
    )
    found = read(facts)
    settings = with_profile(user_settings(patches=[f"+{name}" for name in ON]), found)
    catalog = load_catalog()
    plan = make_plan(found, settings, catalog, None, ["worker"])
    return orders(plan, catalog)


@pytest.fixture(scope="module")
def booted(tmp_path_factory):
    from overlay.bootstrap.arm import pack
    from overlay.vllm_hooks import POINTS

    folder = tmp_path_factory.mktemp("run")
    told = _orders(folder)
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "overlay" / "bootstrap"),
        "OVERLAY_PLAN": pack(told, POINTS),
        "OVERLAY_RUN_DIR": str(folder),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "boot_worker.py")],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return told, json.loads(done.stdout.strip().splitlines()[-1]), folder


def test_nothing_is_applied_before_vllm_ascends_own_patches(booted):
    told, said, _ = booted
    ours = [patch["id"] for patch in told["patches"] if patch["after_call"]]
    assert len(ours) == 16
    assert {said["before"][name] for name in ours} == {"waiting"}


def test_every_patch_is_applied_after_them(booted):
    told, said, _ = booted
    assert said["worker"] == "NPUWorker"
    states = {name: said["receipt"]["patches"][name] for name in (patch["id"] for patch in told["patches"])}
    assert {name: state for name, state in states.items() if state["state"] != "applied"} == {}
    assert {said["after"][patch["id"]] for patch in told["patches"]} == {"applied"}
    for patch in told["patches"]:
        if patch["after_call"]:
            assert set(states[patch["id"]]["builds"].values()) == {"vllm-ascend 0.23.0"}


def test_both_ways_of_patching_are_in_force(booted):
    _, said, _ = booted
    assert said["import replaced"] and said["import by"].startswith("vllm_ascend")  # theirs
    assert said["buffer"] == "ComparedBuffer" and said["views"] == "ascend-gdn-qkv-views"  # ours


def test_the_process_left_a_receipt(booted):
    _, said, folder = booted
    from overlay.ledger import read_run

    receipts, _ = read_run(str(folder))
    (mine,) = [receipt for receipt in receipts if receipt["pid"] == said["receipt"]["pid"]]
    assert {state["state"] for state in mine["patches"].values()} == {"applied"}
