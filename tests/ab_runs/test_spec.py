"""Specs: what is read, and what is refused with which message."""

from pathlib import Path

import pytest
import yaml

from ab_runs import schedule
from ab_runs.presets import PRESETS
from ab_runs.spec import SPECS, SpecError, Workload, load, parse, shipped

GOOD = {
    "name": "demo",
    "model": "model-folder",
    "arms": {"stock": "off", "patched": {"only": ["block-table-dirty"]}},
    "workload": {"preset": "512-128-c1"},
}


def refused(**changes):
    with pytest.raises(SpecError) as error:
        parse({**GOOD, **changes}, "demo.yaml")
    return str(error.value)


def test_a_good_spec_is_read_with_its_defaults():
    spec = parse(GOOD)
    assert spec.base == "stock" and spec.arms["stock"].stock and not spec.arms["patched"].stock
    assert spec.workload.input_len == 512 and spec.workload.warmup_requests == 2
    assert spec.serve_flags == ("--no-enable-prefix-caching",)
    assert spec.workload.temperature == 0


def test_an_unknown_key_is_refused_with_the_nearest_one():
    assert "demo.yaml: boot: unknown key; did you mean 'boots'?" in refused(boot=4)
    assert "workload.outputlen: unknown key; did you mean 'output_len'?" in refused(
        workload={"input_len": 8, "outputlen": 4}
    )
    assert "arms.x.patch: unknown key; did you mean 'patches'?" in refused(arms={"stock": "off", "x": {"patch": []}})


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ({"a": "off", "b": "off"}, "'a' and 'b' are equal"),
        ({"a": "off", "b": {"launch": "vllm"}}, "'a' and 'b' are equal"),
        ({"a": ["+x", "-y"], "b": ["-y", "+x"]}, "'a' and 'b' are equal"),
        ({"a": "off"}, "needs two or more"),
        ({"a": "off", "b": ["x"]}, "'x' is no toggle"),
        ({"a": "off", "B!": ["+x"]}, "'B!' is no name"),
        ({"a": "off", "b": {"launch": "vllm", "patches": ["+x"]}}, "takes no config and no patches"),
        ({"a": "off", "b": {"config": "off", "patches": ["+x"]}}, "use only: [ids] for exactly these"),
        ({"a": "off", "b": {"only": ["x"], "patches": ["+y"]}}, "only: names the whole set"),
        ({"a": "off", "b": {"only": ["+x"]}}, "'+x' is no patch id"),
        ({"a": {"only": ["x", "y"]}, "b": {"only": ["y", "x"]}}, "'a' and 'b' are equal"),
        ({"a": "off", "b": "no-such-file.yaml"}, "arms.b.config: no file 'no-such-file.yaml'"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(arms, message):
    assert message in refused(arms=arms)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boots": 3}, "boots: the order ABBA boots each arm twice"),
        ({"boots": 0}, "boots"),
        ({"workload": {"preset": "nope"}}, "no workload is named 'nope'"),
        ({"workload": {"output_len": 4}}, "give one of input_len and input_range"),
        ({"workload": {"input_range": [9, 4]}}, "wrong way round"),
        ({"acceptance": {"margin": 1}}, "write a share such as 0.01, or a percentage such as 1%"),
        ({"flags": ["--overlay-patches", "+x"]}, "--overlay-patches belongs to an arm"),
        ({"flags": ["--port=80"]}, "--port=80 is chosen by the runner"),
        ({"model": "${NO_SUCH_VARIABLE_HERE}"}, "is not set in the environment"),
        ({"exactness": {"prompts": "no-such.yaml"}}, "no-such.yaml does not exist"),
        ({"name": "Bad Name"}, "name"),
    ],
)
def test_bad_settings_are_refused_by_key(changes, message):
    assert message in refused(**changes)


def test_a_spec_that_is_no_mapping_or_no_yaml_is_refused(tmp_path):
    file = tmp_path / "spec.yaml"
    for text, message in (("- 1", "expected a mapping"), ("a: [", "is no YAML"), ("", "expected a mapping")):
        file.write_text(text)
        with pytest.raises(SpecError, match=message):
            load(file)
    with pytest.raises(SpecError, match="cannot be read"):
        load(tmp_path / "missing.yaml")


def test_margin_takes_a_percentage_or_a_share():
    assert parse({**GOOD, "acceptance": {"margin": "2.5%"}}).acceptance.margin == 0.025
    assert parse({**GOOD, "acceptance": {"margin": 0.02}}).acceptance.margin == 0.02


def test_the_users_own_prefix_caching_flag_stands():
    for flag in ("--enable-prefix-caching", "--no-enable-prefix-caching", "--enable_prefix_caching"):
        assert parse({**GOOD, "flags": [flag]}).serve_flags == (flag,)
    assert parse({**GOOD, "prefix_caching": True}).serve_flags == ("--enable-prefix-caching",)


def test_environment_variables_in_the_model_are_expanded(monkeypatch):
    monkeypatch.setenv("AB_TEST_MODEL", "some/model")
    assert parse({**GOOD, "model": "${AB_TEST_MODEL}"}).model == "some/model"


def test_a_config_is_found_beside_the_spec(tmp_path):
    (tmp_path / "mine.yaml").write_text("{}")
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**GOOD, "arms": {"stock": "off", "mine": "mine.yaml"}}))
    spec = load(tmp_path / "spec.yaml")
    assert Path(spec.arms["mine"].config) == (tmp_path / "mine.yaml").resolve()


def test_the_published_workloads_have_presets():
    shapes = {
        (w.input_len or w.input_range, w.output_len, w.concurrency) for w in map(Workload.model_validate, PRESETS)
    }
    assert shapes >= {(512, 128, 1), (256, 128, 8), (256, 128, 16), (2048, 128, 1), (8192, 64, 1)}
    assert shapes >= {(1024, 512, 1), (1024, 512, 4), (1024, 512, 8)}
    bands = {shape[0] for shape in shapes if isinstance(shape[0], tuple)}
    assert bands == {(4096, 8192), (8192, 16384), (16384, 32768)}


def test_a_preset_can_be_overridden():
    workload = Workload.model_validate({"preset": "4k-8k-c1", "input_len": 100, "requests": 3})
    assert (workload.input_len, workload.input_range, workload.requests, workload.output_len) == (100, None, 3, 256)


def test_orders_are_mirrored_and_hold_the_boots_asked_for():
    assert schedule.order("ABBA", ["a", "b"]) == ["a", "b", "b", "a"]
    assert schedule.order("ABBA", ["a", "b", "c"]) == ["a", "b", "c", "c", "b", "a"]
    assert schedule.order("ABA", ["a", "b", "c"]) == ["a", "b", "a", "c", "a"]
    for order, boots in (("ABBA", 4), ("ABA", 3)):
        made = schedule.slots(parse({**GOOD, "order": order, "boots": boots}))
        assert sum(slot.arm == "patched" for slot in made) == boots
        assert [slot.index for slot in made] == list(range(len(made)))


def test_the_description_says_order_load_and_length():
    text = schedule.describe(parse(GOOD))
    assert "8 boots, order ABBA" in text and "concurrency 1" in text and "nothing was measured yet" in text
    assert text.count("answers") == 4  # two boots of each arm
    assert "about 16 minutes (from 2 finished boots)" in schedule.describe(parse(GOOD), [110, 130])


def test_every_shipped_spec_is_good(monkeypatch):
    monkeypatch.setenv("OVERLAY_CACHE", "cache")
    monkeypatch.setenv("MODEL", "model")
    assert shipped()
    for path in SPECS.glob("*.yaml"):
        assert load(path).name == path.stem
