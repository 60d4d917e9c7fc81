"""The plan for a 910C, from a facts file and an argv as published: TP 2, MTP with four drafts, FULL_DECODE_ONLY."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import yaml

from overlay.catalog import load_catalog
from overlay.launcher import main
from overlay.spec import Exactness, Kind

DATA = Path(__file__).parent / "data"
FACTS = DATA / "910c-qwen3.5-35b-a3b.yaml"
GOLDEN = DATA / "910c-qwen3.5-35b-a3b.golden.json"
ARGV = [
    "Qwen3.5-35B-A3B",
    "--tensor-parallel-size",
    "2",
    "--speculative-config",
    '{"method": "mtp", "num_speculative_tokens": 4}',
    "--compilation-config",
    '{"cudagraph_mode": "FULL_DECODE_ONLY"}',
]


def plan(*flags: str, facts: Path = FACTS, argv: list[str] = ARGV, code: int = 0) -> dict:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        found = main(["--overlay-facts", str(facts), "--overlay-dry-run", "--overlay-json", *flags, *argv])
    assert found == code
    return json.loads(out.getvalue())


def decisions(content: dict) -> dict[str, tuple[str, str]]:
    return {entry["id"]: (entry["verdict"], entry["reason"]) for entry in content["patches"]}


def changed(tmp_path: Path, **sections: dict) -> Path:
    content = yaml.safe_load(FACTS.read_text(encoding="utf-8"))
    for section, values in sections.items():
        content.setdefault(section, {}).update(values)
    file = tmp_path / "facts.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def test_golden_plan():
    """Verdicts, words and variables as they were read and approved."""
    content, golden = plan(), json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert content["settings"]["profile"] == "ascend-910c"
    found = decisions(content)
    assert {name: found[name][0] for name in golden["verdicts"]} == golden["verdicts"]
    assert {name for name in found if name.startswith("ascend-")} <= golden["verdicts"].keys()
    for name, part in golden["reasons"].items():
        assert part in found[name][1], name
    assert content["argv"][-len(golden["argv"]) :] == golden["argv"]
    assert set(content["env"]) == set(golden["env"])
    assert content["digest"] == plan()["digest"]


def test_every_decode_step_has_a_capture_size():
    """Up to 16 requests of five tokens; the default list leaves steps of 10, 20 and 40 without a graph or padded."""
    words = plan()["argv"]
    sizes = json.loads(words[words.index("--compilation-config") + 1])["cudagraph_capture_sizes"]
    assert {5 * n for n in range(1, 17)} <= set(sizes)
    given = [*ARGV[:-1], '{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 5, 8]}']
    assert json.loads(plan(argv=given)["argv"][-1])["cudagraph_capture_sizes"] == [1, 2, 4, 5, 8]  # the user's stands


def test_what_is_on_by_default_claims_bitwise_or_capture_sizes_only():
    catalog = load_catalog()
    for entry in plan()["patches"]:
        if entry["verdict"] == "apply" and entry["id"].startswith("ascend-"):
            patch = catalog[entry["id"]].patch
            assert patch.exactness is Exactness.BITWISE and patch.default and patch.verified == "simulated"


def test_the_profile_agrees_with_the_patches_own_defaults():
    profile = yaml.safe_load((Path(__file__).parents[2] / "configs" / "ascend-910c.yaml").read_text(encoding="utf-8"))
    catalog = load_catalog()
    shipped = {name for name in catalog if name.startswith("ascend-")}
    assert shipped <= profile["patches"].keys()
    for name, on in profile["patches"].items():
        assert catalog[name].patch.default is on, name


def test_every_code_patch_waits_for_vllm_ascends_own_patches():
    for name, entry in load_catalog().items():
        patch = entry.patch
        if name.startswith("ascend-") and patch.kind is Kind.CODE:
            assert patch.after_call == "vllm_ascend.worker.worker:NPUWorker.__init__"
            assert all(list(target.fingerprints) == ["vllm-ascend 0.23.0"] for target in (*patch.targets, *patch.assumes))
        if name.startswith("ascend-"):
            assert patch.condition.plugins == {"vllm_ascend": "==0.23.0"} and patch.verified == "simulated"


@pytest.mark.parametrize(
    "patch, sections, part",
    [
        ("ascend-vocab-parallel-argmax", {"serving": {"tensor_parallel": 1}}, "tensor_parallel is 1"),
        ("ascend-vocab-parallel-argmax", {"serving": {"lora": True}}, "lora is True"),
        ("ascend-vocab-parallel-argmax", {"serving": {"speculative_method": "eagle3"}}, "'eagle3'"),
        ("ascend-vocab-parallel-argmax", {"serving": {"pipeline_parallel": 2}}, "pipeline_parallel is 2"),
        ("ascend-greedy-no-fp32", {"build": {"plugins": {"vllm_ascend": "0.24.0"}}}, "vllm_ascend 0.24.0 is outside"),
        ("ascend-mamba-copy-overlap", {"serving": {"kv_transfer": True}}, "kv_transfer is True"),
        ("ascend-shared-expert-stream", {"env": {"VLLM_ASCEND_ENABLE_FUSED_MC2": "1"}}, "PR 12237"),
        ("ascend-fused-mc2", {}, "fused MC2 asserts expert scales"),
        ("ascend-static-kernel", {}, "which the installed compiler does not know"),
        ("ascend-norm-in-recurrent-kernel", {}, "the build has no such operator"),
        ("ascend-fused-matmul-allreduce-norm", {}, "the build has no such operator"),
    ],
)
def test_a_condition_that_fails_is_named(tmp_path, patch, sections, part):
    flags = ("--overlay-exactness", "rounding", "--overlay-patches", f"+{patch}")
    verdict, reason = decisions(plan(*flags, facts=changed(tmp_path, **sections), code=78))[patch]
    assert verdict == "inapplicable" and part in reason


def test_positions_from_the_host_need_speculation_or_asynchronous_scheduling_off(tmp_path):
    for serving, wanted in (
        ({}, "inapplicable"),
        ({"async_scheduling": False}, "apply"),
        ({"speculative_method": "", "num_speculative_tokens": 0}, "apply"),
        ({"async_scheduling": False, "decode_context_parallel": 2}, "inapplicable"),
    ):
        found = decisions(plan(facts=changed(tmp_path, serving=serving)))
        assert found["ascend-host-slot-mapping"][0] == wanted, serving


def test_fused_mc2_excludes_the_side_stream_and_keeps_the_512_token_limit(tmp_path):
    facts = changed(tmp_path, serving={"quantization": "ascend"})
    content = plan(
        "--overlay-exactness",
        "rounding",
        "--overlay-patches",
        "+ascend-fused-mc2",
        facts=facts,
    )
    assert content["env"]["VLLM_ASCEND_ENABLE_FUSED_MC2"] == "1"
    assert any("512" in note for note in content["notes"])
    both = plan(
        "--overlay-exactness",
        "rounding",
        "--overlay-patches",
        "+ascend-fused-mc2,+ascend-shared-expert-stream",
        facts=facts,
        code=78,
    )
    assert "refused" in {decisions(both)[name][0] for name in ("ascend-fused-mc2", "ascend-shared-expert-stream")}


@pytest.mark.ascend
def test_code_that_the_build_replaces_at_run_time_is_left_to_the_processes(tmp_path: Path):
    """With the real sources at hand: their text is not what will be live, and no patch is refused for it."""
    from importlib.machinery import PathFinder

    root = str(Path(PathFinder.find_spec("vllm").origin).parent)
    found = decisions(plan(facts=changed(tmp_path, build={"root": root})))
    assert {name: reason for name, (verdict, reason) in found.items() if verdict == "refused"} == {}
    assert found["ascend-snapshot-copy"][0] == "apply"
