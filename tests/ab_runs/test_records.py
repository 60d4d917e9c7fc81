"""Kept verdicts: what they hold, whom they speak of, and what they switch off."""

import copy
import dataclasses

import pytest
import yaml

from ab_runs import records as writing
from ab_runs.judge import judge
from ab_runs.store import read_json
from overlay import records
from overlay.facts import Build, Facts, Hardware, Model
from tests.ab_runs.made import FACTS, Made


def facts(**changes):
    groups = {"build": Build, "hardware": Hardware, "model": Model}
    values = copy.deepcopy(FACTS)
    for path, value in changes.items():
        group, _, name = path.partition("__")
        values[group][name] = value
    values["model"]["architectures"] = tuple(values["model"]["architectures"])
    made = {name: kind(**values[name]) for name, kind in groups.items()}
    return dataclasses.replace(Facts(), **made)


def kept(tmp_path, effect=0.05, name="run", **spec):
    made = Made(tmp_path / name, {"patched": effect}, **spec)
    record = writing.make(judge(made.store.folder), made.store.run()["spec"])
    return writing.keep(record, tmp_path / "results"), record


def test_a_record_is_small_and_says_what_it_must(tmp_path):
    path, _ = kept(tmp_path)
    assert path.stat().st_size < 6000
    content = yaml.safe_load(path.read_text())
    assert content["subject"]["hardware.arch"] == "avx2" and content["subject"]["build.version"] == "0.32.0"
    assert content["subject"]["model.num_layers"] == 30 and content["valid"] is True
    assert content["patches"]["patched"] == {"fast": "s-fast"} and content["base"]["patches"] == {}
    effect = content["arms"]["patched"]["effects"]["mean_tpot"]
    assert effect["low"] < effect["estimate"] < effect["high"] and content["arms"]["patched"]["outcome"] == "slower"
    assert str(tmp_path) not in path.read_text()


def test_a_slower_patch_is_left_off_where_hardware_model_and_build_are_the_same(tmp_path):
    path, _ = kept(tmp_path)
    said = records.against(facts(), tmp_path / "results")
    assert list(said) == ["fast"] and said["fast"].startswith("slower +") and path.stem in said["fast"]


@pytest.mark.parametrize(
    "change",
    [
        {"hardware__name": "another CPU"},
        {"hardware__arch": "avx512"},
        {"build__version": "0.33.0"},
        {"build__distribution": "vllm"},
        {"build__plugins": {"vllm-ascend": "0.23.0"}},
        {"model__num_layers": 28},
        {"model__dtype": "float16"},
        {"model__architectures": ["Qwen3ForCausalLM"]},
    ],
)
def test_a_record_says_nothing_of_another_service(tmp_path, change):
    kept(tmp_path)
    assert records.against(facts(**change), tmp_path / "results") == {}


def test_the_name_and_place_of_the_model_do_not_matter(tmp_path):
    kept(tmp_path)
    assert records.against(facts(model__name="x", model__path="y"), tmp_path / "results")


def test_no_difference_undecided_and_invalid_switch_nothing_off(tmp_path):
    kept(tmp_path, 0.0)
    assert records.against(facts(), tmp_path / "results") == {}
    assert records.lines(facts(), tmp_path / "results")[0].count("no difference") == 1
    made = Made(tmp_path / "invalid", {"patched": 0.2})
    made.change(1, window__prefix_cache={"queries": 80, "hits": 16})
    verdict = judge(made.store.folder)
    writing.keep(writing.make(verdict, made.store.run()["spec"]), tmp_path / "results")
    assert verdict["arms"]["patched"]["outcome"] == "invalid"
    assert records.against(facts(), tmp_path / "results") == {}


def test_a_record_can_be_ignored_or_deleted(tmp_path):
    path, record = kept(tmp_path)
    path.write_text(writing.dump({**record, "ignored": True}))
    assert records.against(facts(), tmp_path / "results") == {}
    assert "[ignored]" in records.line(records.load(tmp_path / "results").records[0])
    path.write_text(writing.dump(record))
    assert records.against(facts(), tmp_path / "results")
    path.unlink()
    assert records.against(facts(), tmp_path / "results") == {}


def test_what_a_set_did_blames_no_single_patch(tmp_path):
    kept(tmp_path, arms={"stock": "off", "patched": {"only": ["fast", "wide"]}})
    assert records.against(facts(), tmp_path / "results") == {}
    assert "+fast, +wide" in records.lines(facts(), tmp_path / "results")[0]


def test_other_options_of_one_patch_blame_no_patch(tmp_path):
    """Both arms have the patch: the record says which options are slower, not that the patch is."""
    made = Made(
        tmp_path / "run", {"patched": 0.05}, arms={"stock": {"only": ["fast"]}, "patched": {"only": ["fast", "wide"]}}
    )
    for arm in ("stock", "patched"):
        patches = [{**p, "verdict": "apply" if p["id"] == "fast" else "off"} for p in patches_of(made, arm)]
        patches[0]["options"] = {"n": arm}
        made.change_plan(arm, patches=patches, digest="d-fast")
    for index in (1, 2, 5, 6):
        made.change(index, receipts=[made.receipt(["fast"])])
    record = writing.make(judge(made.store.folder), made.store.run()["spec"])
    assert record["valid"] and record["arms"]["patched"]["outcome"] == "slower"
    assert record["arms"]["patched"]["changed"] == ["fast"] and record["arms"]["patched"]["added"] == []
    writing.keep(record, tmp_path / "results")
    assert records.against(facts(), tmp_path / "results") == {}
    assert "~fast" in records.lines(facts(), tmp_path / "results")[0]


def patches_of(made, arm):
    return read_json(made.store.path("plans", f"{arm}.json"))["patches"]


def test_an_arm_that_lacks_a_patch_speaks_of_it_the_other_way_round(tmp_path):
    """Leave-one-out: faster without the patch means that the patch is slower there."""
    arms = {"all": {"only": ["fast", "wide"]}, "patched": {"only": ["wide"]}}
    _, old = kept(tmp_path, -0.05, arms=arms)
    assert records.against(facts(), tmp_path / "results")["fast"].startswith("slower")
    _, new = kept(tmp_path, 0.05, "other", arms=arms)
    writing.keep({**old, "date": "2024-01-01T00:00:00Z"}, tmp_path / "both")
    writing.keep({**new, "date": "2024-02-01T00:00:00Z"}, tmp_path / "both")
    assert records.against(facts(), tmp_path / "both") == {}


def test_a_later_record_of_the_same_load_takes_the_place_of_an_earlier_one(tmp_path):
    _, old = kept(tmp_path, 0.05)
    _, new = kept(tmp_path, -0.05, "again")
    folder = tmp_path / "both"
    writing.keep({**old, "date": "2024-01-01T00:00:00Z"}, folder)
    writing.keep({**new, "date": "2024-02-01T00:00:00Z"}, folder)
    assert records.against(facts(), folder) == {}
    writing.keep({**old, "date": "2024-03-01T00:00:00Z", "workload": {"input_len": 9}}, folder)
    assert "fast" in records.against(facts(), folder)  # under another load it is slower: both hold


def test_divergent_answers_leave_a_patch_off(tmp_path):
    _, record = kept(tmp_path)
    record["arms"]["patched"]["outcome"] = "divergent"
    writing.keep(record, tmp_path / "other")
    assert records.against(facts(), tmp_path / "other")["fast"].startswith("divergent")


def test_a_file_that_is_no_record_is_a_problem_and_stops_nothing(tmp_path):
    kept(tmp_path)
    (tmp_path / "results" / "a.yaml").write_text("just text")
    (tmp_path / "results" / "b.yaml").write_text("{cut")
    (tmp_path / "results" / "c.yaml").write_text("{subject: {}, arms: {x: 1}}")
    (tmp_path / "results" / "d.yaml").write_text("{figures: of another kind}")
    loaded = records.load(tmp_path / "results")
    assert len(loaded.records) == 1 and len(loaded.problems) == 3
    assert records.against(facts(), tmp_path / "results")
    assert records.against(facts(), tmp_path / "nothing-here") == {}


def test_reading_records_needs_neither_torch_nor_the_comparison():
    import subprocess
    import sys

    from tests.support import ROOT

    code = (
        "import sys; import overlay.records; "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'ab_runs', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_kept_records_of_this_checkout_are_readable():
    assert records.load().problems == []


def test_the_launchers_plan_leaves_off_what_a_record_says_and_takes_it_back_when_told(tmp_path, monkeypatch, capsys):
    """Through ``launch.py`` itself, on the installed build: the automatic choice, the flag, the named patch."""
    import importlib.util
    import json

    from overlay import launcher
    from overlay.detect import detect
    from tests.support import CACHE

    model = str(CACHE / "smollm2")
    if importlib.util.find_spec("vllm") is None or not (CACHE / "smollm2" / "config.json").exists():
        pytest.skip("needs an installed vLLM and the SmolLM2 checkpoint (make env)")

    def verdict(*flags):
        code = launcher.main([model, "--enforce-eager", "--overlay-dry-run", "--overlay-json", *flags])
        plan = json.loads(capsys.readouterr().out)
        (patch,) = [p for p in plan["patches"] if p["id"] == "block-table-dirty"]
        return code, patch["verdict"], patch["reason"]

    monkeypatch.setattr(records, "FOLDER", tmp_path / "results")
    assert verdict()[:2] == (0, "apply")
    _, record = kept(tmp_path / "made")
    import os

    record["subject"] = records.subject(detect([model, "--enforce-eager"], dict(os.environ)).facts)
    record["arms"]["patched"]["added"] = ["block-table-dirty"]
    path = writing.keep(record, tmp_path / "results")
    code, said, reason = verdict()
    assert (code, said) == (0, "off") and "a kept comparison says so: slower" in reason and path.stem in reason
    assert verdict("--overlay-ignore-records")[1] == "apply"
    assert verdict("--overlay-patches=+block-table-dirty")[1] == "apply"
    path.unlink()
    assert verdict()[1] == "apply"
