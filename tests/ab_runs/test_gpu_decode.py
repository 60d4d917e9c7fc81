"""What the GPU scripts of the host-side patches are asked for, and what they make of events, traces and counters."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ab_runs.gpu import common
from ab_runs.gpu.clocks import EDGE, GraphEvents, host_gaps, summarise_events, summarise_trace
from ab_runs.gpu.scenarios import Refused, Scenario, cut, misled, missing, mixed, mixed_repeating, scenario, steady

KINDS = (["linear_attention"] * 3 + ["full_attention"]) * 16


@pytest.fixture
def models(tmp_path):
    """A folder of models as the GPU scripts get it: configurations only."""
    configs = {
        "qwen3-0.6b": {"num_hidden_layers": 28},
        "qwen3.5-27b": {"text_config": {"num_hidden_layers": 64, "layer_types": KINDS}},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


# -- scenarios


def test_a_plain_plan_is_the_engine_it_always_was(models):
    made = scenario("qwen3-0.6b:plain", "V2", models)
    assert made.model == "qwen3-0.6b" and made.requests is steady and made.vary == (40.0,) and not made.needs
    assert made.settings["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16]
    assert scenario("qwen3-0.6b:default", "V2", models).settings == {"max_model_len": 4096}


def test_few_layers_keep_the_kinds_of_layers(models):
    overrides = scenario("qwen3.5-27b:eager+layers8", "V1", models).settings["hf_overrides"]
    assert overrides == {"text_config": {"num_hidden_layers": 8, "layer_types": KINDS[:8]}}
    assert cut({"num_hidden_layers": 28}, 4) == {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("word", "runner", "why"),
    [
        ("qwen3-0.6b:fast", "V1", "none of"),
        ("qwen3-0.6b:plain+typo", "V1", "unknown: typo"),
        ("qwen3-0.6b:plain+spec", "V2", "does not speculate by n-gram"),
        ("qwen3-0.6b:plain+recapture", "V2", "V1 runner only"),
        ("qwen3-0.6b:eager+recapture", "V1", "where there are graphs"),
        ("qwen3-0.6b:plain+layers99", "V1", "28 layers"),
        ("qwen3.5-27b:eager+layers3", "V1", "no layer of kind full_attention"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_with_the_reason(models, word, runner, why):
    with pytest.raises(Refused, match=why):
        scenario(word, runner, models)


def test_speculation_has_graphs_for_all_drafts_and_wants_both_outcomes(models):
    made = scenario("qwen3-0.6b:plain+spec", "V1", models)
    assert made.settings["compilation_config"]["cudagraph_capture_sizes"] == [5, 10, 20, 40, 80]
    assert made.settings["disable_log_stats"] is False and made.speculates and len(made.vary) == 3
    assert made.needs == {"greedy-native-dtype": ("speculation",)}
    both = scenario("qwen3-0.6b:plain+spec+mixed", "V1", models)
    assert both.requests is mixed_repeating and "refused: speculation: min tokens" in both.needs["greedy-native-dtype"]


def test_mixed_requests_hold_every_kind_and_are_the_same_each_time():
    made = mixed(16, 200)
    assert made == mixed(16, 200)
    fields = {name for _, params in made for name in params}
    assert {"min_tokens", "logit_bias", "frequency_penalty", "repetition_penalty", "logprobs", "seed"} <= fields
    assert sum(set(params) == {"temperature", "max_tokens", "ignore_eos"} for _, params in made) == 6
    assert all(params.get("min_tokens", 0) <= params["max_tokens"] for batch in (1, 8) for _, params in mixed(batch, 16))
    assert all(params["temperature"] == 0 and "logit_bias" not in params for _, params in mixed_repeating(8, 200))


def test_every_second_prompt_misleads_the_lookup():
    plain, answers = mixed_repeating(3, 40), [tuple(range(500 + 20 * i, 516 + 20 * i)) for i in range(3)]
    made = misled(mixed_repeating, answers)(3, 40)
    assert made[1] == plain[1] and [params for _, params in made] == [params for _, params in plain]
    for i in (0, 2):
        front, rest = made[i][0][:7], made[i][0][7:]
        assert tuple(front[:3]) == answers[i][5:8] and front[3:] == [11, 12, 13, 14] and rest == plain[i][0]


def test_gdn_is_needed_only_where_its_fast_path_can_run(models):
    """Graphs that were captured without the patch read buffers of each group's own."""
    needs = {word: scenario(f"qwen3.5-27b:{word}", "V1", models).needs for word in ("eager", "plain", "plain+recapture")}
    assert [("gdn-metadata-once" in found) for found in needs.values()] == [True, False, True]
    assert all("mrope-pinned-copy" in found for found in needs.values())


def test_a_counter_that_did_not_move_is_missing():
    needs = {"a": ("hit", "shadow equal"), "b": ("refused: x",)}
    assert missing(needs, {"a": {"hit": 2}}, shadow=True) == ["a: shadow equal", "b: refused: x"]
    assert missing(needs, {"a": {"hit": 2}, "b": {"refused: x": 1}}, shadow=False) == []
    assert common.difference({"a": {"hit": 5, "led": 1}}, {"a": {"hit": 5}}, ["a", "b"]) == {"a": {"led": 1}, "b": {}}


# -- comparing


class StandIn:
    """A Bench whose patched arm differs where it is told to."""

    def __init__(self, wrong_at=None, accepted=3):
        self.arm, self.wrong_at, self.accepted = "stock", wrong_at, accepted
        self.calls, self.counted, self.total = [], 0, {"drafted": 0, "accepted": 0}

    def rpc(self, method, *args):
        self.calls.append(method)
        self.arm = {"probe_apply": "patched", "probe_rollback": "stock"}.get(method, self.arm)
        return {"p": {"hit": self.counted}} if method == "probe_counters" else None

    def generate(self, batch, tokens):
        self.counted += self.arm == "patched"
        self.total = {"drafted": self.total["drafted"] + 4, "accepted": self.total["accepted"] + self.accepted}
        ids = list(range(tokens))
        if self.arm == "patched" and self.wrong_at is not None:
            ids[self.wrong_at] = -1
        return 0.0, [tuple(ids)] * batch

    def drafts(self):
        return dict(self.total)


def three(bench, **changes):
    made = Scenario("m", {}, steady, needs={"p": ("hit",)}, **changes)
    return common.compare(bench, ["p"], {}, made, SimpleNamespace(batches=[1, 2], tokens=10))


def test_equal_arms_with_counted_hits_are_proof():
    found = three(StandIn(), vary=(1.0, 2.0))
    assert found["ids_equal"] and found["stock_repeats"] and found["missing"] == [] and found["idle"] == []
    assert found["counters"] == {"p": {"hit": 4}} and len(found["runs"]) == 4


def test_a_differing_token_is_named():
    found = three(StandIn(wrong_at=7))
    assert not found["ids_equal"] and found["stock_repeats"]
    assert next(iter(found["runs"].values()))["first_difference"] == [7]


def test_a_needed_patch_that_is_not_for_the_engine_is_missing():
    made = Scenario("m", {}, steady, needs={"other": ("hit",)})
    found = common.compare(StandIn(), ["p"], {}, made, SimpleNamespace(batches=[1], tokens=10))
    assert found["missing"] == ["other: not for this engine"]


@pytest.mark.parametrize(("accepted", "proved"), [(0, False), (3, True), (4, False)])
def test_drafts_must_be_accepted_and_rejected(accepted, proved):
    found = three(StandIn(accepted=accepted), speculates=True)
    assert (found["missing"] == []) is proved
    assert found["drafts"] == {"drafted": 8, "accepted": 2 * accepted}


def test_graphs_are_captured_under_the_patches_and_again_without_them():
    bench = StandIn()
    three(bench, recapture=True)
    steps = [call for call in bench.calls if call in ("probe_apply", "probe_recapture", "probe_rollback")]
    assert steps == ["probe_apply", "probe_recapture", "probe_rollback", "probe_recapture"] * 2


# -- events


class Clock:
    """The device's time in us, and events that read it."""

    now = 0.0

    class Event:
        def __init__(self, clock):
            self.clock, self.at = clock, None

        def record(self):
            self.at = self.clock.now

        def elapsed_time(self, later):
            return (later.at - self.at) / 1e3

    def event(self):
        return Clock.Event(self)


def test_events_tell_the_inside_of_a_step_from_its_outside():
    clock = Clock()
    events = GraphEvents(clock.event, room=40)

    def replay():
        clock.now += 1000.0

    for step in range(50):  # more than there is room for
        clock.now += 900.0 if step < EDGE else 80.0  # prefill and the like
        events.around(replay, replay)
    found = events.summary()
    assert found["steps"] == 40 - 2 * EDGE
    assert (found["inside_us"], found["outside_us"], found["period_us"]) == (1000.0, 80.0, 1080.0)
    assert events.graph_alone(lambda: None) == 1000.0


def test_few_steps_give_no_figures():
    assert summarise_events([1.0] * 10, [1.0] * 9) == {"steps": 0}
    assert host_gaps({"steps": 0}, {"busy_outside_us": 3.0}) == {"steps": 0}
    assert host_gaps({}, {}) == {}


def test_the_gap_is_what_neither_the_graph_nor_the_work_outside_of_it_explains():
    events = {"inside_us": 1040.0, "outside_us": 80.0, "period_us": 1120.0, "graph_alone_us": 1000.0}
    found = host_gaps(events, {"busy_outside_us": 30.0})
    assert (found["host_gap_us"], found["launch_wait_us"], found["gap_of_step_us"]) == (50.0, 40.0, 90.0)


class Traced:
    """One of the profiler's events."""

    def __init__(self, name, start, length, correlation, device):
        self.values = (name, start, length, correlation, "DeviceType.CUDA" if device else "DeviceType.CPU")

    name = property(lambda self: lambda: self.values[0])
    start_ns = property(lambda self: lambda: self.values[1])
    duration_ns = property(lambda self: lambda: self.values[2])
    correlation_id = property(lambda self: lambda: self.values[3])
    device_type = property(lambda self: lambda: self.values[4])


def trace(steps=20):
    """Steps of 100 us: a kernel of 5 us, a graph of 20 kernels of 2 us, an argmax of 6 us; beside the graph a copy."""
    events, correlation = [], 0

    def launch(call, at, kernels):
        nonlocal correlation
        correlation += 1
        events.append(Traced(call, at, 900, correlation, False))
        for name, start, length in kernels:
            events.append(Traced(name, start, length, correlation, True))

    for step in range(steps):
        t = step * 100_000
        launch("cuLaunchKernelEx", t, [("decode_step", t + 3000, 5000)])
        launch("cudaGraphLaunch", t + 6000, [(f"layer {i}", t + 10_000 + 2000 * i, 2000) for i in range(20)])
        launch("cudaMemcpyAsync", t + 7000, [("Memcpy DtoH (Device -> Pinned)", t + 12_000, 1000)])
        launch("cudaLaunchKernel", t + 8000, [("argmax", t + 55_000, 6000)])
    return events


def test_a_trace_gives_the_work_outside_the_graph():
    found = summarise_trace(trace())
    assert found["steps"] == 11
    assert (found["launches_per_step"], found["copies_per_step"]) == (2.0, 1.0)
    assert found["busy_us"] == pytest.approx(51, abs=1)
    assert found["busy_outside_us"] == pytest.approx(11, abs=0.6)  # not the copy: it runs beside the graph
    assert found["idle_us"] == pytest.approx(found["span_us"] - found["busy_us"], abs=0.2)


def test_the_table_takes_what_measure_gives(capsys):
    arm = {
        "trace": {"launches_per_step": 4.0},
        "host": {"period_us": 1.0, "us_per_step": {}, "dispatch": {}},
        "events": {"inside_us": 1040.0, "host_gap_us": 50.0},
        "front": {},
    }
    times = {"stock": [1.0], "patched": [1.0]}
    entry = {"stock": arm, "patched": arm, "tpot_ms": times, "ids_equal": True, "distinct_tokens": 3}
    common.table({"engines": {"m:plain": {"batches": {1: entry}}, "other": {"failed": "x"}}})
    head, *rows = [line for line in capsys.readouterr().out.splitlines() if line.count(" | ") > 5]
    assert len(rows) == 2 and all(row.count("|") == head.count("|") for row in rows)
