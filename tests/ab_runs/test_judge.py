"""From files to a verdict: every rule of validity, answers, speed, and files of other builds."""

import json

import pytest

from ab_runs import judge as judging
from ab_runs import validity
from ab_runs.judge import judge
from ab_runs.store import StoreError
from tests.ab_runs.made import Made, answer, bench


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path / "run")


def rules(verdict):
    return {v["rule"] for v in verdict["violations"]}


def seen(made, rule):
    verdict = judge(made.store.folder)
    assert rules(verdict) == {rule}, verdict["violations"]
    assert not verdict["valid"] and verdict["arms"]["patched"]["outcome"] == "invalid"
    assert rule in verdict["arms"]["patched"]["summary"] and rule in validity.RULES
    return verdict["violations"]


def test_equal_arms_are_no_different(made):
    verdict = judge(made.store.folder)
    arm = verdict["arms"]["patched"]
    assert verdict["valid"] and verdict["complete"] and arm["outcome"] == "no difference"
    assert arm["effects"]["mean_tpot"]["low"] < 0 < arm["effects"]["mean_tpot"]["high"]
    assert "no difference larger than 1.00%, identical answers" in arm["summary"]
    assert set(arm["effects"]) == {"mean_tpot", "p99_tpot", "mean_ttft", "output_throughput"}


def test_a_true_effect_is_found_with_its_sign(tmp_path):
    faster = judge(Made(tmp_path / "a", {"patched": -0.05}).store.folder)["arms"]["patched"]
    slower = judge(Made(tmp_path / "b", {"patched": 0.05}).store.folder)["arms"]["patched"]
    assert faster["outcome"] == "faster" and slower["outcome"] == "slower"
    assert faster["effects"]["output_throughput"]["verdict"] == "faster"
    assert faster["effects"]["mean_ttft"]["verdict"] != "faster"
    assert faster["effects"]["mean_tpot"]["estimate"] == pytest.approx(-0.05, abs=0.006)


def test_noise_is_undecided_and_says_how_many_boots_would_decide(tmp_path):
    verdict = judge(Made(tmp_path / "run", {"patched": 0.01}, noise=0.015).store.folder)
    arm = verdict["arms"]["patched"]
    assert arm["outcome"] == "undecided" and arm["effects"]["mean_tpot"]["more_boots"] > 0
    assert "more boots per arm would decide" in arm["summary"]


def test_failed_requests(made):
    made.change(1, "bench.json", output_lens=[16] * 9 + [0], errors=[""] * 9 + ["Traceback\nTimeoutError: too late"])
    verdict = judge(made.store.folder)
    assert "failed-requests" in rules(verdict)
    (said,) = [v for v in verdict["violations"] if v["rule"] == "failed-requests"]
    assert "1 of 10: TimeoutError: too late" in said["detail"] and said["boots"] == (1,)


def test_missing_requests(made):
    result = json.loads((made.store.sample_folder(made.slot(2)) / "bench.json").read_text())
    lists = {key: value[:9] for key, value in result.items() if isinstance(value, list)}
    made.change(2, "bench.json", **lists)
    assert "9 requests in place of 10" in seen(made, "missing-requests")[0]["detail"]


def test_answers_that_got_shorter_are_not_speed(tmp_path):
    """As in the public case where 1388 tokens became 682: every boot of the arm is 'faster'."""
    made = Made(tmp_path / "run")
    for index in (1, 2, 5, 6):
        result = json.loads((made.store.sample_folder(made.slot(index)) / "bench.json").read_text())
        made.change(index, "bench.json", output_lens=[8] * 10, itls=[gaps[:7] for gaps in result["itls"]])
    found = seen(made, "token-counts")
    assert "160 against 80 tokens; request 0: 16 against 8" in found[0]["detail"] and len(found) == 4


def test_a_warm_prefix_cache(made):
    made.change(3, window__prefix_cache={"queries": 80, "hits": 16})
    assert "16 of 80 tokens" in seen(made, "warm-prefix-cache")[0]["detail"]


def test_an_engine_that_caches_prefixes_against_the_spec(made):
    """`enable-prefix-caching: false` in a file was once dropped: the effective setting counts, not the flag."""
    for index in range(8):
        made.change(index, engine__enable_prefix_caching="True")
    assert "though it was to be off" in seen(made, "warm-prefix-cache")[0]["detail"]


def test_prefix_caching_on_purpose_must_serve_both_arms_alike(tmp_path):
    made = Made(tmp_path / "run", prefix_caching=True)
    for slot in range(8):
        made.change(slot, window__prefix_cache={"queries": 100, "hits": 40})
    assert judge(made.store.folder)["valid"]
    made.change(1, window__prefix_cache={"queries": 100, "hits": 90})
    assert "40.0% of the tokens in one boot and 90.0%" in judge(made.store.folder)["violations"][0]["detail"]


@pytest.mark.parametrize("what", ["new_cache_files", "compile_lines"])
def test_kernels_compiled_while_measured(made, what):
    made.change(0, **{f"window__{what}": ["triton/kernel.cubin"]})
    assert "triton/kernel.cubin" in seen(made, "compiled-while-measured")[0]["detail"]


def test_drift_between_the_first_and_the_last_base_boot(tmp_path):
    made = Made(tmp_path / "run", noise=0.0001)
    import numpy as np

    made.change(7, "bench.json", **bench(56, np.random.default_rng(1)))
    assert "allowed 5.0%" in seen(made, "drift")[0]["detail"]


def test_a_patch_without_a_single_hit_while_it_was_measured(made):
    made.change(5, window__counters={"fast": {"refused: mixed batch": 40}})
    (found,) = seen(made, "patch-without-hits")
    assert found["boots"] == (5,) and "fast: refused: mixed batch 40" in found["detail"]
    made.change(5, window__counters={})
    assert "fast: no call at all" in seen(made, "patch-without-hits")[0]["detail"]


@pytest.mark.parametrize(
    ("receipts", "said"),
    [
        ([], "no process left a receipt"),
        (
            [{"pid": 7, "role": "worker", "digest": "other", "patches": {"fast": {"state": "applied"}}}],
            "ran under plan other",
        ),
        ([{"pid": 7, "role": "worker", "digest": "d-fast", "patches": {}}], "fast was applied in no process"),
        (
            [
                {
                    "pid": 7,
                    "role": "worker",
                    "digest": "d-fast",
                    "patches": {"fast": {"state": "failed", "reason": "drift"}},
                }
            ],
            "fast failed in process 7 (worker): drift",
        ),
    ],
)
def test_a_process_that_did_not_run_under_the_plan(made, receipts, said):
    made.change(2, receipts=receipts)
    assert said in str(seen(made, "not-in-force"))


@pytest.mark.parametrize(
    ("updates", "said"),
    [
        ({"facts__serving": {"num_speculative_tokens": 4}}, "facts.serving.num_speculative_tokens: 0 against 4"),
        (
            {"argv": ["carry.py", "serve", "other-model", "--enforce-eager", "--compilation-config", '{"mode": 0}']},
            "other-model",
        ),
        ({"argv": ["carry.py", "serve", "m", "--enforce-eager", "--max-num-seqs", "4"]}, "argv.max_num_seqs"),
        (
            {"argv": ["carry.py", "serve", "m", "--enforce-eager", "--compilation-config", '{"mode": 3}']},
            "argv.compilation_config.mode: 0 against 3",
        ),
        ({"env": {"VLLM_SOMETHING": "1"}}, "env.VLLM_SOMETHING"),
    ],
)
def test_plans_that_differ_in_more_than_the_patches(made, updates, said):
    made.change_plan("patched", **updates)
    assert said in str(seen(made, "unequal-environments"))


def test_what_a_config_patch_says_that_it_adds_is_no_inequality(tmp_path):
    made = Made(tmp_path / "run", arms={"stock": "off", "patched": {"only": ["knob"]}})
    made.change(1, engine__capture_sizes=[1, 2])  # it is the sizes that the patch sets
    assert judge(made.store.folder)["valid"]
    words = ["carry.py", "serve", "m", "--enforce-eager", "--compilation-config", '{"sizes": [1, 2], "mode": 3}']
    made.change_plan("patched", argv=words)
    assert "argv.compilation_config.mode" in str(seen(made, "unequal-environments"))


@pytest.mark.parametrize(
    ("updates", "said"),
    [
        ({"engine__dtype": "float16"}, "engine setting dtype: bfloat16 against float16"),
        ({"engine__capture_sizes": [1, 2, 8]}, "capture_sizes"),
        ({"machine__cpu": "another CPU"}, "machine, cpu"),
        ({"machine__libraries": {"torch": "2.12"}}, "machine, libraries"),
    ],
)
def test_boots_whose_engine_or_machine_differs(made, updates, said):
    made.change(6, **updates)
    assert said in str(seen(made, "unequal-environments"))


def test_too_few_boots(tmp_path):
    made = Made(tmp_path / "run", boots=2)
    found = seen(made, "too-few-boots")
    assert {v["arm"] for v in found} == {"stock", "patched"} and "2 good boots, 3 are needed" in found[0]["detail"]


def test_a_model_that_never_loads_is_said_with_the_end_of_its_log(made):
    for index in (1, 2, 5, 6):
        reason = {"code": "server-died", "detail": "exit code 1", "log": "Traceback\nOSError: no such model"}
        made.store.finish_sample(made.slot(index), {"arm": "patched", "status": "failed", "reason": reason}, [])
    verdict = judge(made.store.folder)
    (found,) = [v for v in verdict["violations"] if v["rule"] == "too-few-boots"]
    assert (
        "0 good boots" in found["detail"]
        and "4 failed" in found["detail"]
        and "OSError: no such model" in found["detail"]
    )
    assert verdict["arms"]["patched"]["outcome"] == "invalid"


def test_a_busy_machine_is_noted(made):
    made.change(2, state_before={"load": [6.5, 1, 1]})
    verdict = judge(made.store.folder)
    assert verdict["valid"] and "load 6.5 on 2 cores" in verdict["notes"][0]


def test_a_result_of_another_vllm_with_fields_missing_is_named_and_the_rest_is_judged(made):
    folder = made.store.sample_folder(made.slot(4))
    content = json.loads((folder / "bench.json").read_text())
    del content["ttfts"]
    (folder / "bench.json").write_text(json.dumps(content))
    record = json.loads((folder / "sample.json").read_text())
    made.store.finish_sample(
        made.slot(4), {k: v for k, v in record.items() if k not in ("files", "format")}, ["bench.json"]
    )
    (found,) = seen(made, "unreadable-result")
    assert "lacks ttfts" in found["detail"] and found["boots"] == (4,)
    assert len(judge(made.store.folder)["boots"]) == 7


def test_a_cut_off_sample_is_missing_and_said(made):
    file = made.store.sample_folder(made.slot(3)) / "bench.json"
    file.write_bytes(file.read_bytes()[:50])
    verdict = judge(made.store.folder)
    assert verdict["missing"] == [3] and not verdict["complete"]
    assert any("boots 3 are missing" in note for note in verdict["notes"])


def test_a_failed_boot_is_left_out_and_noted(made):
    record = {
        "index": 1,
        "arm": "patched",
        "status": "failed",
        "reason": {"code": "server-died", "detail": "exit 1", "log": "x"},
    }
    made.store.finish_sample(made.slot(1), record, [])
    verdict = judge(made.store.folder)
    assert verdict["valid"] and len(verdict["boots"]) == 7 and verdict["failed"][0]["code"] == "server-died"
    assert "boot 1 (patched) failed: server-died: exit 1" in verdict["notes"]


def change_answers(made, arm, first):
    for index in range(8):
        folder = made.store.sample_folder(made.slot(index))
        if made.slot(index).arm == arm and (folder / "answers.json").exists():
            content = json.loads((folder / "answers.json").read_text())
            content[0] = first
            (folder / "answers.json").write_text(json.dumps(content))
            made.change(index)


def test_divergent_answers_come_before_speed(tmp_path):
    made = Made(tmp_path / "run", {"patched": -0.2})
    change_answers(made, "patched", answer((5, 6, 99)))
    arm = judge(made.store.folder)["arms"]["patched"]
    assert arm["outcome"] == "divergent" and "prompt 0 diverges at token 2" in arm["summary"]


def test_a_near_tie_of_a_batch_patch_needs_another_padded_size(tmp_path):
    made = Made(tmp_path / "run", arms={"stock": "off", "patched": {"only": ["wide"]}})
    tie, flipped = answer(), answer((5, 6, 1007))
    tie["top"][2] = {"7": -0.70, "1007": -0.72}
    flipped["top"][2] = {"7": -0.73, "1007": -0.71}
    change_answers(made, "stock", tie)
    change_answers(made, "patched", flipped)
    arm = judge(made.store.folder)["arms"]["patched"]
    assert arm["outcome"] == "divergent" and arm["answers"]["verdict"] == "near-tie"
    # One token at a time ran padded to 1 in both arms; with capture sizes from 2 on in one arm it does not.
    for index in (1, 2, 5, 6):
        made.change(index, engine__capture_sizes=[2, 4])
    made.change_plan("patched", patches=[{**p, "kind": "config"} for p in plans_of(made, "patched")])
    arm = judge(made.store.folder)["arms"]["patched"]
    assert arm["answers"]["acceptable"] and arm["answers"]["verdict"] == "near-tie"


def plans_of(made, arm):
    return json.loads(made.store.path("plans", f"{arm}.json").read_text())["patches"]


def test_a_folder_that_is_no_run_is_said(tmp_path):
    with pytest.raises(StoreError, match="holds no run"):
        judge(tmp_path)
    made = Made(tmp_path / "run")
    made.store.path("plans", "stock.json").write_text('{"facts"')
    with pytest.raises(StoreError, match="stock.json: is cut off or no JSON"):
        judge(made.store.folder)
    content = json.loads(made.store.path("run.json").read_text())
    content["spec"]["new_key"] = 1
    made.store.path("run.json").write_text(json.dumps(content))
    with pytest.raises(StoreError, match="cannot be read by this version"):
        judge(made.store.folder)


def test_judging_twice_gives_the_same_and_changes_no_file(made):
    before = {p: p.read_bytes() for p in made.store.folder.rglob("*") if p.is_file()}
    assert judging.to_json(judge(made.store.folder)) == judging.to_json(judge(made.store.folder))
    assert before == {p: p.read_bytes() for p in made.store.folder.rglob("*") if p.is_file()}
