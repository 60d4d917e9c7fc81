"""Plans for machines that are not here: the DCU profile on the vendor's fork and on its plugin, from facts files."""

import contextlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from overlay.launcher import main
from tests.support import CACHE

HERE = Path(__file__).parent / "data"
UPSTREAM = CACHE / "src" / "vllm-0.18.1" / "vllm"
EVERY = ("decode-input-prep", "block-table-dirty", "llmm1-rows-per-block")


def plan(facts: Path, *flags: str, code: int = 0) -> dict:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["--overlay-facts", str(facts), "--overlay-dry-run", "--overlay-json", *flags, "Qwen3.5-27B"]) == code
    return json.loads(out.getvalue())


def verdicts(content: dict) -> dict[str, str]:
    return {entry["id"]: entry["verdict"] for entry in content["patches"]}


def reason(content: dict, patch: str) -> str:
    return next(entry["reason"] for entry in content["patches"] if entry["id"] == patch)


@pytest.mark.parametrize("machine", ["dcu-fork-0.18.1", "dcu-plugin-0.28"])
def test_golden_plan(machine):
    """The whole decision about a machine, as it was read and approved: verdicts, facts, words and variables."""
    content = plan(HERE / "machines" / f"{machine}.yaml")
    golden = json.loads((HERE / "golden" / f"{machine}.json").read_text())
    assert content["settings"]["profile"] == "dcu-gfx936"
    assert {name: verdicts(content)[name] for name in golden["verdicts"]} == golden["verdicts"]
    for name, part in golden["reasons"].items():
        assert part in reason(content, name)
    for path, value in golden["facts"].items():
        section, fact = path.split(".")
        assert content["facts"][section][fact] == value, path
    assert content["argv"][-len(golden["argv"]) :] == golden["argv"] and set(content["env"]) == set(golden["env"])


def changed(tmp_path: Path, machine: str, **sections: dict) -> Path:
    content = yaml.safe_load((HERE / "machines" / f"{machine}.yaml").read_text())
    for section, values in sections.items():
        content[section].update(values)
    file = tmp_path / "facts.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("hardware", {"arch": "gfx942", "platform": "rocm"}, None),
        ("serving", {"async_scheduling": False}, "serving.async_scheduling is False"),
        ("serving", {"pipeline_parallel": 2}, "serving.pipeline_parallel is 2"),
        ("serving", {"decode_context_parallel": 2}, "serving.decode_context_parallel is 2"),
        ("serving", {"lora": True}, "serving.lora is True"),
        ("serving", {"speculative_method": "mtp", "num_speculative_tokens": 3}, "serving.speculative_method is 'mtp'"),
        ("serving", {"runner": "V2"}, "the model runner is V2"),
        ("serving", {"async_scheduling": None}, "serving.async_scheduling is unknown"),
    ],
)
def test_outside_its_gate_decode_input_prep_stays_out(tmp_path, section, values, said):
    content = plan(changed(tmp_path, "dcu-fork-0.18.1", **{section: values}))
    if said is None:  # other hardware: the profile is not for it
        assert content["settings"]["profile"] != "dcu-gfx936"
        return
    assert verdicts(content)["decode-input-prep"] == "inapplicable" and said in reason(content, "decode-input-prep")


def test_the_profile_is_for_gfx936_and_this_model_alone(tmp_path, capsys):
    file = changed(tmp_path, "dcu-fork-0.18.1", model={"architectures": ["Qwen3ForCausalLM"]})
    assert main(["--overlay-facts", str(file), "--overlay-dry-run", "--overlay-profile", "dcu-gfx936", "m"]) == 2
    said = capsys.readouterr().err
    assert "architectures" in said and "Qwen3_5ForConditionalGeneration" in said and "Traceback" not in said


def test_the_profile_is_for_one_device_alone(tmp_path, capsys):
    file = changed(tmp_path, "dcu-fork-0.18.1", serving={"tensor_parallel": 2})
    assert plan(file)["settings"]["profile"] != "dcu-gfx936"
    assert main(["--overlay-facts", str(file), "--overlay-dry-run", "--overlay-profile", "dcu-gfx936", "m"]) == 2
    assert "serving.tensor_parallel: wanted 1, found 2" in capsys.readouterr().err


# --- with sources ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A fork's package: upstream 0.18.1's files, linked one by one."""
    if not UPSTREAM.is_dir():
        pytest.skip("the sources of vLLM 0.18.1 are not here")
    root = tmp_path_factory.mktemp("fork") / "vllm"
    shutil.copytree(UPSTREAM, root, copy_function=os.symlink)
    return root


@pytest.mark.releases
def test_a_fork_whose_sources_were_verified_takes_the_patches(tmp_path, fork):
    content = plan(changed(tmp_path, "dcu-fork-0.18.1", build={"root": str(fork)}))
    for name in ("decode-input-prep", "block-table-dirty"):
        assert verdicts(content)[name] == "apply" and "vllm 0.18.1" in reason(content, name)
    assert verdicts(content)["llmm1-rows-per-block"] == "inapplicable"
    assert "lacks the op" in reason(content, "llmm1-rows-per-block")  # the wheel brings no vllm._rocm_C


@pytest.mark.releases
def test_the_same_version_with_another_source_is_refused_by_fingerprint(tmp_path, fork):
    """A hot-fixed image: one line of ``commit_block_table`` differs, the version says nothing of it."""
    file = fork / "v1/worker/block_table.py"
    text = file.read_text()
    file.unlink()
    assert "self.block_table.copy_to_gpu(num_reqs)" in text
    file.write_text(text.replace("self.block_table.copy_to_gpu(num_reqs)", "self.block_table.copy_to_gpu(num_reqs + 0)"))
    facts = changed(tmp_path, "dcu-fork-0.18.1", build={"root": str(fork)})
    try:
        content = plan(facts)
        assert verdicts(content)["block-table-dirty"] == "refused"
        assert "commit_block_table" in reason(content, "block-table-dirty")
        assert verdicts(content)["decode-input-prep"] == "apply"  # what it relies on is unchanged
        plan(facts, "--overlay-patches", "+block-table-dirty", code=78)
    finally:
        file.unlink()
        file.symlink_to(UPSTREAM / "v1/worker/block_table.py")


@pytest.mark.releases
@pytest.mark.parametrize("version", ["dev", "0.18.0-hotfix", "0.1.dev2922+gbb3f938cb"])
def test_under_an_unknown_version_only_fingerprints_decide(tmp_path, fork, version):
    content = plan(changed(tmp_path, "dcu-fork-0.18.1", build={"root": str(fork), "version": version}))
    assert content["facts"]["build"]["public"] is None and version in content["facts"]["unknown"]["build.public"]
    assert verdicts(content)["decode-input-prep"] == "apply" and "vllm 0.18.1" in reason(content, "decode-input-prep")
    # a target that only later releases have cannot be left out without knowing the release
    assert verdicts(content)["block-table-dirty"] == "refused" and "is missing" in reason(content, "block-table-dirty")
