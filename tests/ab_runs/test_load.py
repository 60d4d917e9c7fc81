"""Reading ``vllm bench serve`` results of several releases, and its command line."""

import json
from pathlib import Path

import pytest

from ab_runs import load
from ab_runs.client import parse_metrics
from ab_runs.load import BenchError
from ab_runs.spec import Workload

# Two requests: 5 tokens in 4 gaps, and 5 tokens in 2 gaps (speculation: several tokens a chunk). True TPOT: 10 ms each.
OLD = {
    "duration": 0.2,
    "completed": 2,
    "ttfts": [0.05, 0.06],
    "itls": [[0.01, 0.01, 0.01, 0.01], [0.02, 0.02]],
    "output_lens": [5, 5],
    "errors": ["", ""],
    "generated_texts": ["a", "b"],
    "mean_tpot_ms": 10.0,
}


def test_tpot_comes_from_token_counts_and_not_from_chunks():
    figures = load.parse(OLD).figures()
    assert figures["mean_tpot"] == pytest.approx(10.0)
    assert figures["p99_tpot"] == pytest.approx(10.0)  # from chunks the second would say 20
    assert figures["mean_ttft"] == pytest.approx(55.0)
    assert figures["output_throughput"] == pytest.approx(50.0)


def test_results_with_and_without_latencies_say_the_same():
    new = {**OLD, "latencies": [0.09, 0.10], "queue_times": [0, 0]}
    assert load.parse(new).figures() == pytest.approx(load.parse(OLD).figures())
    del new["itls"]
    assert load.parse(new).figures() == pytest.approx(load.parse(OLD).figures())


def test_a_failed_request_is_seen_and_left_out_of_the_figures():
    bench = load.parse({**OLD, "output_lens": [5, 0], "errors": ["", "timeout"], "itls": [[0.01] * 4, []]})
    assert bench.failed == [1]
    assert bench.figures()["mean_ttft"] == pytest.approx(50.0)
    # An HTTP error without a reason phrase leaves no error text, only no tokens.
    assert load.parse({**OLD, "output_lens": [5, 0], "itls": [[0.01] * 4, []]}).failed == [1]


@pytest.mark.parametrize("name", ["ttfts", "output_lens", "duration"])
def test_a_missing_field_is_named_with_what_was_found(name):
    content = {key: value for key, value in OLD.items() if key != name}
    with pytest.raises(BenchError, match=f"lacks {name}; it holds .*completed"):
        load.parse(content)
    with pytest.raises(BenchError, match="latencies .or itls."):
        load.parse({key: value for key, value in OLD.items() if key != "itls"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ttfts": [0.05]}, "argument|different lengths"),
        ({"ttfts": ["x", "y"]}, "something else than numbers"),
        ({"output_lens": [5, 5, 5]}, "different lengths"),
        ({"duration": 0}, "duration of 0"),
        ({"output_lens": [1, 1]}, "there is no TPOT"),
    ],
)
def test_a_result_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(BenchError, match=message):
        load.parse({**OLD, **change}).figures()
    with pytest.raises(BenchError):
        load.parse([])


def flags(workload, ratios=True, serve=()):
    made = load.bench_flags(
        Workload.model_validate(workload),
        model="m",
        served="s",
        port=7,
        seed=3,
        folder=Path("out"),
        ratios=ratios,
        serve=serve,
    )
    return {name: value for name, value in zip(made, [*made[1:], ""], strict=True) if name.startswith("--")}


def test_the_load_is_spelled_in_flags_that_every_release_has():
    made = flags({"preset": "256-128-c8"})
    assert made["--random-input-len"] == "256" and made["--random-output-len"] == "128"
    assert made["--max-concurrency"] == "8" and made["--temperature"] == "0.0"
    assert "--save-result" in made and "--save-detailed" in made and made["--result-filename"] == "bench.json"


def test_bands_become_a_mean_and_a_ratio_in_the_builds_own_form():
    new, old = flags("4k-8k-c1"), flags("4k-8k-c1", ratios=False)
    assert new["--random-input-len"] == old["--random-input-len"] == "6144"
    assert json.loads(new["--random-range-ratio"]) == {"input": pytest.approx(1 / 3, abs=1e-6), "output": 0.0}
    assert float(old["--random-range-ratio"]) == pytest.approx(1 / 3, abs=1e-6)


def test_another_data_set_takes_the_place_of_the_random_one():
    made = flags({"input_len": 8, "extra": ["--dataset-name", "custom", "--dataset-path", "x.jsonl"]})
    assert made["--dataset-name"] == "custom" and "--random-input-len" not in made


def test_tokenizer_settings_of_the_server_hold_for_the_client():
    made = flags("512-128-c1", serve=["--trust-remote-code", "--tokenizer", "t", "--tokenizer_mode=slow"])
    assert "--trust-remote-code" in made and made["--tokenizer"] == "t" and made["--tokenizer-mode"] == "slow"


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0"])
def test_every_flag_exists_in_the_sources_of_each_release(release):
    root = Path.home() / ".cache/vllm-overlay/src" / f"vllm-{release}" / "vllm"
    if not root.exists():
        pytest.skip("the sources of this release are not unpacked here")
    files = [root / "benchmarks/serve.py", *root.glob("benchmarks/datasets.py"), *root.glob("benchmarks/datasets/*.py")]
    text = "".join(file.read_text() for file in files)
    for flag in {**flags("4k-8k-c1", serve=["--trust-remote-code", "--tokenizer-mode=slow"]), "--request-rate": ""}:
        assert f'"{flag}"' in text, flag
    assert load.two_ratios(root) == (release != "0.18.1")


def test_prometheus_counters_are_summed_over_labels():
    text = (
        '# HELP x y\nvllm:prefix_cache_hits_total{engine="0"} 3.0\nvllm:prefix_cache_hits_total{engine="1"} 4\n'
        "bad line\nplain 1e3\n"
    )
    assert parse_metrics(text) == {"vllm:prefix_cache_hits": 7.0, "plain": 1000.0}
