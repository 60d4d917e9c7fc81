"""The runner from its plans to its record, with a stand-in server that dies, hangs and misbehaves on request."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ab_runs import cli, plans, runner
from ab_runs.judge import judge
from ab_runs.plans import PlanError
from ab_runs.schedule import slots
from ab_runs.server import group_members
from ab_runs.spec import parse
from ab_runs.store import Store, StoreError, read_json

STAND_IN = Path(__file__).with_name("stand_in.py")
ROOT = Path(__file__).resolve().parent.parent.parent

SPEC = {
    "name": "stand-in",
    "model": "m",
    "arms": {"stock": "off", "patched": {"only": ["fast"]}},
    "workload": {"input_len": 8, "output_len": 4, "requests": 3, "warmup": 1},
    "boots": 2,
    "exactness": {"count": 2, "max_tokens": 3},
    "acceptance": {"min_boots": 2, "drift": "50%", "margin": "5%"},
    "server": {"start_timeout": 60, "load_timeout": 60, "stop_timeout": 10},
}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(plans, "LAUNCH", STAND_IN)
    monkeypatch.delenv("STAND_IN_MODE", raising=False)


def dump(spec):
    return yaml.safe_dump(spec, sort_keys=False)


def make(**changes):
    return parse({**SPEC, **changes})


def run(spec, folder):
    said = []
    store = runner.run(spec, folder, said.append)
    return store, said, judge(store.folder)


def test_a_run_goes_from_plans_to_a_valid_verdict(tmp_path):
    store, said, verdict = run(make(), tmp_path / "run")
    assert verdict["valid"], verdict["violations"]
    assert [boot["arm"] for boot in verdict["boots"]] == ["stock", "patched", "patched", "stock"]
    arm = verdict["arms"]["patched"]
    assert arm["added"] == ["fast"] and arm["answers"]["verdict"] == "identical"
    assert verdict["hits"]["patched"]["fast"]["hit"] == 2 * 3  # of the measured requests only: no warm-up, no answers
    assert any("[1/4] stock: boot" in line for line in said) and any("TPOT" in line for line in said)
    for slot in slots(make()):  # nothing is left running
        pid = read_json(store.sample_folder(slot) / "server.json")["pid"]
        assert not group_members(pid)


def test_each_arm_has_caches_of_its_own_and_no_overlay_settings_from_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLAY_RUN_DIR", "leftover")
    one, other = (plans.environment(make(), tmp_path / name) for name in "ab")
    names = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    assert all(one[name] != other[name] for name in names) and "OVERLAY_RUN_DIR" not in one


def test_a_server_that_dies_ends_its_sample_with_its_log_and_not_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_MODE", "dies-at-boot@2")
    store, said, verdict = run(make(), tmp_path / "run")
    assert len(verdict["boots"]) == 3
    (failed,) = verdict["failed"]
    assert failed["index"] == 1 and failed["code"] == "server-died" and "no such model" in failed["log"]
    assert any("no such model" in line for line in said)
    assert not verdict["valid"] and verdict["violations"][0]["rule"] == "too-few-boots"
    assert any("server-died" in note for note in verdict["notes"])

    monkeypatch.delenv("STAND_IN_MODE")
    runner.run(make(), tmp_path / "run", said.append)  # a failed boot is a result: it is not measured again by itself
    assert len(judge(store.folder)["boots"]) == 3
    runner.run(make(), tmp_path / "run", said.append, retry_failed=True)
    assert judge(store.folder)["valid"]


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("dies-in-load@1", "server-died"),
        ("hangs-in-load@1", "load-timeout"),
        ("never-healthy@1", "server-never-healthy"),
    ],
)
def test_a_server_that_fails_later_ends_its_sample_too(tmp_path, monkeypatch, mode, code):
    monkeypatch.setenv("STAND_IN_MODE", mode)
    short = {"server-never-healthy": "start_timeout", "load-timeout": "load_timeout"}.get(code, "stop_timeout")
    spec = make(server={**SPEC["server"], short: 6})
    _, _, verdict = run(spec, tmp_path / "run")
    assert [failed["code"] for failed in verdict["failed"]] == [code] and len(verdict["boots"]) == 3


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("no-hits", "patch-without-hits"),
        ("compiles", "compiled-while-measured"),
        ("warm-cache", "warm-prefix-cache"),
    ],
)
def test_what_happens_in_the_measured_window_is_seen(tmp_path, monkeypatch, mode, rule):
    monkeypatch.setenv("STAND_IN_MODE", mode)
    _, _, verdict = run(make(), tmp_path / "run")
    assert not verdict["valid"] and {v["rule"] for v in verdict["violations"]} == {rule}
    assert verdict["arms"]["patched"]["outcome"] == "invalid"


def test_an_interrupted_run_resumes_where_it_stopped(tmp_path):
    said = []

    def stop_at_third(text):
        said.append(text)
        if text.startswith("[3/4]") and text.endswith("load"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(make(), tmp_path / "run", stop_at_third)
    store = Store(tmp_path / "run")
    all_slots = slots(make())
    done = [store.sample(slot) is not None for slot in all_slots]
    assert done == [True, True, False, False]
    kept = (store.sample_folder(all_slots[0]) / "sample.json").read_bytes()

    (store.sample_folder(all_slots[1]) / "bench.json").write_text('{"cut o')  # and the disk was full
    said = []
    runner.run(make(), tmp_path / "run", said.append)
    assert judge(store.folder)["valid"]
    assert (store.sample_folder(all_slots[0]) / "sample.json").read_bytes() == kept
    assert [line for line in said if "set aside" in line] and "[1/4] stock: boot" not in said
    aside = sorted(path.name for path in store.path("samples").iterdir() if ".cut-" in path.name)
    assert aside == ["001-patched.cut-1", "002-patched.cut-1"]


def test_a_runner_killed_outright_leaves_no_server_behind_for_the_next_one(tmp_path):
    """SIGKILL gives no chance to clean up: the next start ends the server that was left and measures the boot again."""
    (tmp_path / "spec.yaml").write_text(dump({**SPEC, "workload": {**SPEC["workload"], "requests": 3}}))
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; from ab_runs import plans, runner, spec; "
        f"plans.LAUNCH = Path({str(STAND_IN)!r}); "
        f"runner.run(spec.load(Path({str(tmp_path / 'spec.yaml')!r})), Path({str(tmp_path / 'run')!r}))"
    )
    env = {**os.environ, "STAND_IN_MODE": "hangs-in-load@1"}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "stock: load" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stderr.close()
    pid = read_json(tmp_path / "run/samples/000-stock/server.json")["pid"]
    assert group_members(pid)

    said = []
    runner.run(make(), tmp_path / "run", said.append)
    assert not group_members(pid)
    assert any("ended the server that an interrupted run left behind" in line for line in said)
    assert judge(tmp_path / "run")["valid"]


def test_sigterm_stops_the_server_and_leaves_a_folder_to_resume(tmp_path):
    def terminate(text):
        if text.endswith("load"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        runner.run(make(), tmp_path / "run", terminate)
    assert not group_members(read_json(tmp_path / "run/samples/000-stock/server.json")["pid"])


def test_a_finished_run_is_not_measured_again(tmp_path):
    store, _, _ = run(make(), tmp_path / "run")
    cli.finish(store.folder, None)
    with pytest.raises(StoreError, match="finished and is never overwritten"):
        runner.run(make(), tmp_path / "run", print)


def test_an_arm_whose_plan_refuses_is_said_before_anything_boots(tmp_path):
    with pytest.raises(PlanError) as error:
        runner.run(make(arms={"stock": "off", "bad": {"only": ["broken"]}}), tmp_path / "run", print)
    assert "arm 'bad'" in str(error.value) and "broken: refused: its source was never verified" in str(error.value)
    assert not (tmp_path / "run/samples").exists()


def test_arms_whose_plans_come_out_equal_are_said_before_anything_boots(tmp_path):
    with pytest.raises(PlanError, match="'stock' and 'same' end up with the same patches .none."):
        runner.run(make(arms={"stock": "off", "same": {"patches": ["-fast"]}}), tmp_path / "run", print)


def test_arms_that_differ_in_more_than_their_patches_are_said_before_anything_boots(tmp_path):
    with pytest.raises(PlanError) as error:
        runner.run(make(arms={"stock": "off", "other": {"only": ["sneaky"]}}), tmp_path / "run", print)
    assert "differ in more than their patches" in str(error.value) and "argv.max_num_seqs" in str(error.value)
    assert not (tmp_path / "run/samples").exists()


def test_a_patch_that_changed_since_the_run_began_is_not_mixed_in(tmp_path):
    store, _, _ = run(make(), tmp_path / "run")
    file = store.path("plans", "patched.json")
    content = json.loads(file.read_text())
    next(p for p in content["patches"] if p["id"] == "fast")["source"] = "older"
    file.write_text(json.dumps(content))
    with pytest.raises(StoreError, match="'patched' is no longer what this run began with .patch fast"):
        runner.run(make(), tmp_path / "run", print)


def test_a_patch_that_rounds_gets_a_quality_figure_and_a_divergence_is_the_outcome(tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_MODE", "diverges")
    _, _, verdict = run(make(arms={"stock": "off", "rounded": {"only": ["rounder"]}}), tmp_path / "run")
    arm = verdict["arms"]["rounded"]
    assert verdict["valid"] and arm["outcome"] == "divergent" and arm["answers"]["verdict"] == "divergent"
    assert arm["answers"]["quality"]["change"] == 0 and arm["answers"]["quality"]["texts"] >= 20


def test_what_a_config_patch_adds_is_no_inequality(tmp_path):
    _, _, verdict = run(make(arms={"stock": "off", "knob": {"only": ["knob"]}}), tmp_path / "run")
    assert verdict["valid"], verdict["violations"]


def test_the_command_line_measures_reports_and_keeps_a_record(tmp_path, capsys):
    file = tmp_path / "spec.yaml"
    file.write_text(dump(SPEC))
    arguments = ["run", str(file), "--out", str(tmp_path / "run"), "--results", str(tmp_path / "results")]
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert "4 boots, order ABBA" in capsys.readouterr().out and not (tmp_path / "run").exists()
    assert cli.main(arguments) == 0
    assert "patched against stock" in capsys.readouterr().out
    assert {"verdict.json", "report.md", "record.yaml", "finished.json"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    (record,) = (tmp_path / "results").iterdir()
    assert yaml.safe_load(record.read_text())["arms"]["patched"]["added"] == ["fast"]
    assert str(tmp_path) not in record.read_text() and os.uname().nodename not in record.read_text()
    assert cli.main(arguments) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert cli.main(["judge", str(tmp_path / "run")]) == 0
    assert json.loads(capsys.readouterr().out) == read_json(tmp_path / "run/verdict.json")
    assert cli.main(["records", "--results", str(tmp_path / "results")]) == 0
    assert "+fast" in capsys.readouterr().out


def test_a_run_measured_without_scipy_says_so_and_is_closed_where_scipy_is(tmp_path, monkeypatch, capsys):
    file = tmp_path / "spec.yaml"
    file.write_text(dump(SPEC))
    out, results = ["--out", str(tmp_path / "run")], ["--results", str(tmp_path / "results")]
    with monkeypatch.context() as without:
        for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
            without.delitem(sys.modules, name)
        without.setitem(sys.modules, "scipy", None)
        without.setattr("ab_runs.stats._t", _uncached())
        assert cli.main(["run", str(file), *out, *results]) == 2
        assert "to judge it install scipy" in capsys.readouterr().err
    assert not (tmp_path / "run/finished.json").exists() and not (tmp_path / "results").exists()
    assert cli.main(["report", str(tmp_path / "run"), *results]) == 0
    assert (tmp_path / "run/finished.json").exists() and len(list((tmp_path / "results").iterdir())) == 1


def _uncached():
    from ab_runs import stats

    return stats._t.__wrapped__  # an interval of an earlier test must not answer in scipy's place


def test_without_a_folder_a_run_resumes_the_unfinished_one_and_leaves_finished_ones_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "OUT", tmp_path)
    assert cli.unfinished("demo") == tmp_path / "demo"
    store = Store(tmp_path / "demo")
    store.begin({})
    assert cli.unfinished("demo") == tmp_path / "demo"
    store.finish({})
    assert cli.unfinished("demo") == tmp_path / "demo-2"


def test_leave_one_out_measures_the_set_without_each_of_its_patches(tmp_path, capsys):
    file = tmp_path / "spec.yaml"
    file.write_text(dump({**SPEC, "arms": {"stock": "off", "set": {"only": ["fast", "knob"]}}}))
    arguments = ["leave-one-out", str(file), "--out", str(tmp_path / "run"), "--no-record"]
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert "without-fast, without-knob" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "what the set loses without each patch" in said and "knob" in said
    verdict = read_json(tmp_path / "run/verdict.json")
    assert verdict["arms"]["without-fast"]["removed"] == ["fast"] and verdict["base"] == "all"


def test_bisect_finds_the_patch_that_changes_the_answers_by_booting_subsets(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("STAND_IN_MODE", "diverges")
    file = tmp_path / "spec.yaml"
    file.write_text(dump({**SPEC, "arms": {"stock": "off", "set": {"only": ["fast", "rounder", "knob"]}}}))
    arguments = ["bisect", str(file), "--for", "answers", "--out", str(tmp_path / "search")]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert said.startswith("rounder: it alone is enough")
    assert cli.main(arguments) == 0  # everything is there: the search is repeated from its folders, without a boot
    found = capsys.readouterr()
    assert found.out == said and "boot" not in found.err
