"""The command line: what passes through, what is refused, with which message and exit code. Nothing is booted here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import CACHE, ROOT

CHECKPOINT = CACHE / "smollm2"


def launch(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "launch.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, cwd=cwd, timeout=120)


def refused(done: subprocess.CompletedProcess, code: int, *parts: str) -> None:
    assert done.returncode == code, (done.returncode, done.stdout[-500:], done.stderr[-1500:])
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr


def plan(*words: str, **more) -> dict:
    done = launch(*words, "--overlay-dry-run", "--overlay-json", **more)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def verdicts(content: dict) -> dict[str, str]:
    return {patch["id"]: patch["verdict"] for patch in content["patches"]}


V1_CUDA = """
build: {distribution: vllm, version: 0.26.0, public: 0.26.0}
hardware: {platform: cuda, arch: sm90, name: NVIDIA H200, count: 1}
model: {architectures: [Qwen3ForCausalLM], model_type: qwen3, moe: false}
serving: {runner: V1, tensor_parallel: 1, pipeline_parallel: 1, num_speculative_tokens: 4, speculative_method: ngram,
          max_num_seqs: 8, max_num_batched_tokens: 2048, enforce_eager: false, lora: false, async_scheduling: true}
"""


def test_the_dry_run_says_what_would_happen():
    content = plan(str(CHECKPOINT), "--enforce-eager")
    assert set(content) >= {"facts", "patches", "argv", "env", "digest"}
    assert content["facts"]["model"]["architectures"] == ["LlamaForCausalLM"]
    assert content["facts"]["serving"]["runner"] == "V1"
    for patch in content["patches"]:
        assert patch["verdict"] in ("apply", "off", "inapplicable", "superseded", "refused") and patch["reason"]
    assert verdicts(content)["block-table-dirty"] == "apply"
    assert content["argv"][-2:] == [str(CHECKPOINT), "--enforce-eager"]
    assert str(ROOT / "overlay/bootstrap") in content["env"]["PYTHONPATH"]
    text = launch(str(CHECKPOINT), "--enforce-eager", "--overlay-dry-run").stdout
    for part in ("Facts", "Patches", "Command", "Environment added", "Digest", content["digest"]):
        assert part in text


def test_the_same_start_has_the_same_digest_and_another_patch_set_another():
    first = plan(str(CHECKPOINT), "--enforce-eager")
    assert first["digest"] == plan(str(CHECKPOINT), "--enforce-eager")["digest"]
    assert first["digest"] != plan(str(CHECKPOINT), "--enforce-eager", "--overlay-patches", "-block-table-dirty")["digest"]


def test_serve_is_accepted_and_vllm_flags_pass_through_unchanged():
    words = ["--max_num_seqs=4", "--hf-overrides", '{"a": {"b": 1}}', "-O0", "--compilation-config.cudagraph_mode", "NONE"]
    assert plan("serve", str(CHECKPOINT), *words)["argv"][-len(words) :] == words


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_each_patch_knows_its_runner(tmp_path: Path, runner: str):
    facts = tmp_path / "facts.yaml"
    facts.write_text(V1_CUDA.replace("runner: V1", f"runner: {runner}"))
    content = verdicts(plan("Qwen/Qwen3-4B", "--overlay-facts", str(facts)))
    expected = "apply" if runner == "V1" else "inapplicable"
    assert content["block-table-dirty"] == content["min-tokens-mask-cache"] == expected
    assert content["spec-capture-sizes"] == "apply"
    assert content["sampler-staged-writes"] == ("inapplicable" if runner == "V1" else "apply")


def test_unknown_overlay_flags_name_the_nearest():
    refused(launch(str(CHECKPOINT), "--overlay-pathces", "+x"), 2, "unknown flag --overlay-pathces", "--overlay-patches")
    refused(launch(str(CHECKPOINT), "--overlay-config"), 2, "--overlay-config: expected a value")
    refused(launch(str(CHECKPOINT), "--overlay-exactness", "exact"), 2, "--overlay-exactness", "bitwise")
    refused(launch(str(CHECKPOINT), "--overlay-patches", "block-table-dirty"), 2, "expected +ID or -ID")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("patchs: {}\n", ["unknown key 'patchs'", "did you mean 'patches'"]),
        ("patches: {block-table-dirt: true}\n", ["unknown patch 'block-table-dirt'", "did you mean 'block-table-dirty'"]),
        ("patches: {block-table-dirty: 3}\n", ["patches.block-table-dirty", "true, false or a mapping"]),
        ("patches: {spec-capture-sizes: {max_request: 3}}\n", ["unknown option", "did you mean 'max_requests'"]),
        ("patches: {spec-capture-sizes: {max_requests: many}}\n", ["max_requests", "expected int"]),
        ("exactness: exact\n", ["exactness", "bitwise, batch, rounding"]),
        ("enabled: 3\n", ["enabled", "true or false"]),
        ("a: [1\n", ["not YAML"]),
        ("- a\n", ["expected a mapping"]),
        ("exactness: batch\nexactness: bitwise\n", ["stands twice"]),
        ("patch_dirs: [nowhere]\n", ["nowhere", "not a folder"]),
        ("profile: no-such\n", ["profile 'no-such'", "no such file"]),
    ],
)
def test_bad_settings_name_file_key_and_what_was_expected(tmp_path: Path, text: str, parts: list[str]):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    done = launch(str(CHECKPOINT), "--overlay-config", str(file), "--overlay-dry-run")
    refused(done, 2, *parts)
    if "patch_dirs" not in text and "profile" not in text:
        assert str(file) in done.stderr


def test_an_unreadable_settings_file_is_named(tmp_path: Path):
    refused(launch(str(CHECKPOINT), "--overlay-config", str(tmp_path / "none.yaml")), 2, "none.yaml", "cannot be read")
    refused(launch(str(CHECKPOINT), "--overlay-config", str(tmp_path)), 2, str(tmp_path), "cannot be read")


def test_a_profile_for_other_hardware_is_refused():
    done = launch(str(CHECKPOINT), "--overlay-profile", "dcu-gfx936", "--overlay-dry-run")
    refused(done, 2, "dcu-gfx936", "other hardware", "found cpu")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("for: {facts: [1]}\n", "for.facts: expected a mapping"),
        ("for: {facts: {serving.no_such: 1}}\n", "serving.no_such: no such fact"),
        ("for: {platform: [cpu]}\n", "did you mean 'platforms'"),
        ("for: {platforms: cpu}\n", "for.platforms: expected a list"),
    ],
)
def test_a_bad_profile_is_refused_with_its_key(tmp_path: Path, text: str, part: str):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    refused(launch(str(CHECKPOINT), "--overlay-profile", str(file), "--overlay-dry-run"), 2, str(file), part)


def test_a_patch_that_the_user_named_and_that_cannot_apply_stops_the_launch(tmp_path: Path):
    done = launch(str(CHECKPOINT), "--enforce-eager", "--overlay-patches", "+sampler-staged-writes")
    refused(done, 78, "cannot apply what you asked for", "sampler-staged-writes: inapplicable: the model runner is V1")
    file = tmp_path / "mine.yaml"
    file.write_text("patches: {sampler-staged-writes: true}\n")
    refused(launch(str(CHECKPOINT), "--overlay-config", str(file)), 78, "sampler-staged-writes")


OWN = """
from overlay.spec import Exactness, Kind, Patch, Target
PATCH = Patch(id="{id}", kind=Kind.CODE, summary="s", why="w", remove_when="r", exactness=Exactness.BITWISE,
    targets=(Target("{at}", "wrapper", fingerprints={{"vllm 0.32.0": "{digest}"}}),))
def wrapper(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)
"""
AT = "vllm.v1.worker.block_table:BlockTable.commit_block_table"


def test_a_source_never_verified_is_refused_until_that_drift_is_accepted(tmp_path: Path):
    at = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
    (tmp_path / "own.py").write_text(OWN.format(id="own", at=at, digest="0123456789abcdef"))
    flags = [str(CHECKPOINT), "--overlay-patch-dir", str(tmp_path), "--overlay-patches", "+own"]
    refused(launch(*flags), 78, "own: refused", at, "found", "0123456789abcdef", "--overlay-accept-drift own")
    content = plan(*flags, "--overlay-accept-drift", "own")
    assert verdicts(content)["own"] == "apply"
    assert "drift accepted" in next(p["reason"] for p in content["patches"] if p["id"] == "own")
    # chosen by no user: skipped with its reason, or stopping everything under on_refusal: stop
    quiet = [str(CHECKPOINT), "--overlay-patch-dir", str(tmp_path)]
    assert verdicts(plan(*quiet))["own"] == "refused"
    refused(launch(*quiet, "--overlay-on-refusal", "stop"), 78, "own: refused")


def test_two_owners_of_one_target_are_refused_with_both_names(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN.format(id="own", at=AT, digest="0123456789abcdef"))
    refused(launch(str(CHECKPOINT), "--overlay-patch-dir", str(tmp_path)), 2, "two owners", "'own'", "'block-table-dirty'", AT)


def test_a_bad_patch_folder_is_refused(tmp_path: Path):
    refused(launch(str(CHECKPOINT), "--overlay-patch-dir", str(tmp_path)), 2, "no patch in it")
    (tmp_path / "broken.py").write_text("PATCH = 1 +\n")
    refused(launch(str(CHECKPOINT), "--overlay-patch-dir", str(tmp_path)), 2, "broken.py:1")
    (tmp_path / "broken.py").write_text("PATCH = 1 / 0\n")
    refused(launch(str(CHECKPOINT), "--overlay-patch-dir", str(tmp_path)), 2, "does not import", "ZeroDivisionError")


def test_a_model_path_that_does_not_exist_is_named():
    refused(launch("/no/such/model"), 2, "/no/such/model", "no such folder")


def test_no_vllm_is_one_clear_message(tmp_path: Path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    command = [str(bare / "bin/python"), str(ROOT / "launch.py"), "model"]
    refused(subprocess.run(command, capture_output=True, text=True), 2, "no vLLM is installed", str(bare))


def fake_vllm(folder: Path, version: str) -> dict[str, str]:
    """An importable package ``vllm`` of that version without any code: what is asked is only how its version is read."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text("")
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "RECORD").write_text("vllm/__init__.py,,\n")
    return {"PYTHONPATH": str(folder)}


def test_a_vllm_older_than_any_supported_is_refused(tmp_path: Path):
    refused(launch("model", env=fake_vllm(tmp_path, "0.11.0")), 2, "vLLM 0.11.0", "older than any supported")


@pytest.mark.parametrize("version", ["dev", "0.11.0+das.opt1.rc2.dtk2604"])
def test_odd_versions_are_read_and_never_traced_back(tmp_path: Path, version: str):
    done = launch("model", env=fake_vllm(tmp_path, version))
    assert done.returncode in (2, 78) and "Traceback" not in done.stderr, done.stderr
    assert version in done.stderr or "vllm" in done.stderr


def test_vllms_own_complaint_about_its_flags_comes_from_vllm():
    done = launch(str(CHECKPOINT), "--no-such-vllm-flag")
    assert done.returncode == 2 and "unrecognized arguments: --no-such-vllm-flag" in done.stderr
    assert "launch.py:" not in done.stderr


def test_the_catalogue_is_listed():
    text = launch("--overlay-list").stdout
    rows = json.loads(launch("--overlay-list", "--overlay-json").stdout)
    assert {"block-table-dirty", "min-tokens-mask-cache", "spec-capture-sizes"} <= {row["id"] for row in rows}
    for row in rows:
        assert row["id"] in text and row["summary"] and row["why"] and row["remove_when"]


SHOW = (
    "import os, sys; armed = [f for f in sys.meta_path if type(f).__name__ == '_FirstImport'];"
    "print(os.environ.get('PYTHONPATH', ''), 'OVERLAY_PLAN' in os.environ, len(armed))"
)


def test_another_program_starts_under_the_plan_and_stock_starts_without(tmp_path: Path):
    done = launch("--overlay-exec", "--", sys.executable, "-c", SHOW)
    assert done.stdout == f"{ROOT / 'overlay/bootstrap'} True 1\n", done.stderr
    done = launch("--overlay-config", str(ROOT / "configs/off.yaml"), "--overlay-exec", "--", sys.executable, "-c", SHOW)
    assert done.stdout == " False 0\n", done.stderr
    refused(launch("--overlay-exec", "python"), 2, "behind --")
    refused(launch("--overlay-exec", "--", "no-such-program"), 2, "no-such-program", "cannot be started")


def test_a_launch_inside_a_launch_replaces_the_outer_plan():
    inner = [sys.executable, str(ROOT / "launch.py"), "--overlay-patches", "-block-table-dirty", "--overlay-exec", "--"]
    done = launch("--overlay-exec", "--", *inner, sys.executable, "-c", SHOW)
    assert done.stdout == f"{ROOT / 'overlay/bootstrap'} True 1\n", done.stderr
    digests = [line.split()[2] for line in done.stderr.splitlines() if line.startswith("overlay: plan")]
    assert len(digests) == 2


def test_an_exit_code_passes_through():
    assert launch("--overlay-exec", "--", sys.executable, "-c", "raise SystemExit(41)").returncode == 41


def test_the_launcher_imports_neither_torch_nor_vllm(tmp_path: Path):
    code = (
        "import sys; sys.argv = ['launch.py', sys.argv[1], '--overlay-dry-run']; sys.path.insert(0, sys.argv[0] and '.');"
        "from overlay.launcher import main; main(sys.argv[1:]);"
        "bad = [n for n in sys.modules if n.partition('.')[0] in ('torch', 'vllm', 'numpy', 'transformers', 'triton')];"
        "sys.exit(f'imported {bad[:5]}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(CHECKPOINT)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-500:]
