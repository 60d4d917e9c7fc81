"""Arms of a GPU comparison: what they are started with, what counts as in force, and what the figures say."""

import json
import struct

import pytest

from ab_runs.gpu import adapter, arms
from ab_runs.gpu.boots import lines, summary
from ab_runs.gpu.gemm_quality import judge
from overlay.catalog import load_catalog
from overlay.ledger import RECORD

TILES, HOST, OTHER = "gemm-tiles", "sampler-staged-writes", "block-table-dirty"


@pytest.fixture
def run(tmp_path):
    """A run's folder: verdicts of the plan, states in the worker, counts of hits."""

    def make(verdicts, states, hits=(), role="engine+worker", digest="d", rank=0):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        plan = [{"id": name, "verdict": verdict, "reason": "why", "kind": "code"} for name, verdict in verdicts.items()]
        (folder / "plan.json").write_text(json.dumps({"digest": "d", "patches": plan}))
        receipt = {"pid": 7 + rank, "role": role, "rank": rank, "digest": digest, "runner": "V2", "patches": states}
        (folder / f"receipt-{7 + rank}.json").write_text(json.dumps(receipt))
        counters = bytearray(8 * RECORD)
        for at, (name, count) in enumerate(hits):
            struct.pack_into("=Q", counters, at * RECORD, count)
            text = f"{name}|hit".encode()
            counters[at * RECORD + 8 : at * RECORD + 8 + len(text)] = text
        (folder / f"counters-{7 + rank}.bin").write_bytes(counters)
        return folder

    return make


PROVEN = {"state": "applied", "verified": True, "builds": {"a:b": "vllm 0.26.0"}}


def test_an_arm_is_good_when_its_patch_is_verified_and_ran(run):
    said = arms.proof("tiles", run({TILES: "apply"}, {TILES: PROVEN}, [(TILES, 3)]))
    assert said["problems"] == []
    assert said["in_force"] == {TILES: {"builds": ["vllm 0.26.0"], "counters": {"hit": 3}}}


@pytest.mark.parametrize(
    ("verdict", "state", "hits", "problem"),
    [
        ("inapplicable", {}, (), "NOT IN FORCE: inapplicable: why"),
        ("apply", {"state": "failed", "reason": "drift"}, (), "NOT IN FORCE: drift"),
        ("apply", {"state": "applied"}, [(TILES, 3)], "never verified"),
        ("apply", PROVEN, (), "never ran"),
        # what another arm may lack without harm, this one is about
        ("apply", {"state": "waiting"}, (), "never imported"),
    ],
)
def test_an_arm_without_its_patch_is_a_problem(run, verdict, state, hits, problem):
    problems = arms.proof("tiles", run({TILES: verdict}, {TILES: state}, hits))["problems"]
    assert any(TILES in line and problem in line for line in problems)


@pytest.mark.parametrize(
    ("reason", "problems"), [("what came up is not what it is for: the runner is V2, not V1", 0), ("ValueError: broken", 1)]
)
def test_a_patch_for_another_runner_is_no_problem_and_a_failed_one_is(run, reason, problems):
    states = {HOST: PROVEN, OTHER: {"state": "failed", "reason": reason}}
    said = arms.proof("host", run({HOST: "apply", OTHER: "apply"}, states))
    assert len(said["problems"]) == problems and list(said["in_force"]) == [HOST]
    assert (OTHER in said["elsewhere"]) == (not problems)


UNMET = "it requires x, which is not in force: "


@pytest.mark.parametrize(
    ("reason", "problems"),
    [
        (f"{UNMET}what came up is not what it is for: the runner is V2, not V1", 0),
        (f"{UNMET}{UNMET}what came up is not what it is for: the runner is V2, not V1", 0),
        (f"{UNMET}ApplyError: x: its source is unknown", 1),
        (f"{UNMET}it is not part of the plan", 1),
    ],
)
def test_a_patch_is_elsewhere_where_one_that_it_requires_is(run, reason, problems):
    states = {HOST: PROVEN, OTHER: {"state": "failed", "reason": reason}}
    said = arms.proof("host", run({HOST: "apply", OTHER: "apply"}, states))
    assert len(said["problems"]) == problems
    assert (OTHER in said["elsewhere"]) == (not problems)


def test_what_an_arm_is_about_may_not_be_elsewhere(run):
    reason = f"{UNMET}what came up is not what it is for: the runner is V2, not V1"
    said = arms.proof("tiles", run({TILES: "apply"}, {TILES: {"state": "failed", "reason": reason}}))
    assert TILES in said["not_in_force"] and not said["elsewhere"]


@pytest.mark.parametrize(("more", "problem"), [({"role": "api"}, "no worker"), ({"digest": "e"}, "one plan")])
def test_processes_must_be_there_and_of_one_plan(run, more, problem):
    problems = arms.proof("tiles", run({TILES: "apply"}, {TILES: PROVEN}, [(TILES, 1)], **more))["problems"]
    assert any(problem in line for line in problems)


def test_every_rank_must_have_its_patch_and_have_run_it(run):
    folder = run({TILES: "apply"}, {TILES: PROVEN}, [(TILES, 3)], role="worker")
    assert any("2 workers were expected" in line for line in arms.proof("tiles", folder, 2)["problems"])
    run({TILES: "apply"}, {TILES: PROVEN}, role="worker", rank=1)
    assert any("never ran on rank 1" in line for line in arms.proof("tiles", folder, 2)["problems"])
    run({TILES: "apply"}, {TILES: {"state": "applied"}}, [(TILES, 4)], role="worker", rank=1)
    assert any("never verified" in line for line in arms.proof("tiles", folder, 2)["problems"])
    run({TILES: "apply"}, {TILES: PROVEN}, [(TILES, 4)], role="worker", rank=1)
    said = arms.proof("tiles", folder, 2)
    assert said["problems"] == [] and said["in_force"][TILES]["counters"] == {"hit": 7}
    assert any("1 workers were expected" in line for line in arms.proof("tiles", folder)["problems"])


def test_several_ranks_use_no_multicast_and_one_rank_is_left_alone():
    settings = {"tensor_parallel_size": 2, "compilation_config": {"mode": 3, "pass_config": {"eliminate_noops": True}}}
    made = arms.without_multicast(settings)["compilation_config"]
    assert made == {"mode": 3, "pass_config": {"eliminate_noops": True, "fuse_allreduce_rms": False}}
    assert arms.without_multicast({"max_model_len": 5}) == {"max_model_len": 5}
    assert arms.environment(2, X="y")["NCCL_NVLS_ENABLE"] == "0"
    assert arms.environment(1).get("VLLM_ALLREDUCE_USE_SYMM_MEM") is None


def test_the_adapter_is_one_that_vllm_loads_and_the_same_each_time(tmp_path):
    torch, lora = pytest.importorskip("torch"), pytest.importorskip("vllm.lora.lora_model")
    from vllm.lora.peft_helper import PEFTHelper

    config = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32,
    }  # fmt: skip
    one, two = (adapter.make(config, tmp_path / name) for name in "ab")
    assert (one / "adapter_model.safetensors").read_bytes() == (two / "adapter_model.safetensors").read_bytes()
    found = adapter.projections(config)
    names = {name.rpartition(".")[2] for name in found}
    helper = PEFTHelper.from_local_dir(str(one), None)
    loaded = lora.LoRAModel.from_local_checkpoint(str(one), names, helper, device="cpu", dtype=torch.bfloat16).loras
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in found.items()}
    assert {name: (part.lora_b.shape[0], part.lora_a.shape[1]) for name, part in loaded.items()} == shapes
    assert all(part.lora_b.any() and part.rank == adapter.RANK and part.scaling == 1 for part in loaded.values())
    with pytest.raises(ValueError, match="without experts"):
        adapter.make(config | {"num_experts": 4}, tmp_path / "c")


def test_a_launch_that_ended_early_is_a_problem(tmp_path):
    assert arms.proof("tiles", tmp_path)["problems"]
    assert arms.proof("stock", tmp_path / "nothing")["problems"] == []


def test_tiles_switches_off_every_other_patch_and_names_none(tmp_path):
    assert arms.settings("tiles")["patches"] == dict.fromkeys(set(load_catalog()) - {TILES}, False)
    assert arms.settings("all")["patches"] == arms.settings("host")["patches"] == {}
    assert arms.settings("all", tmp_path)["patches"] == {TILES: {"tables": str(tmp_path)}}
    assert arms.settings("host", tmp_path)["patches"] == {}


def test_only_stock_is_started_without_the_launcher(tmp_path):
    assert "launch.py" not in " ".join(arms.command("stock", ["x.py"], tmp_path / "run"))
    words = arms.command("tiles", ["x.py", "--child"], tmp_path / "run")
    assert words[1].endswith("launch.py") and words[-2:] == ["x.py", "--child"]
    assert json.loads((tmp_path / "run.yaml").read_text())["exactness"] == "rounding"


def engine(arm, place, tpot, answers="a", problems=()):
    times = {1: [{"tpot_ms": value, "answers": answers} for value in tpot]}
    return {
        "name": arm, "model": "m", "arm": arm, "pass": place[0], "wave": place[1], "problems": list(problems),
        "ready": {"tokens": [1, 2, 3] if arm == "stock" else [1, 2, 4]}, "times": times,
    }  # fmt: skip


def test_the_ratio_is_taken_within_a_wave_and_ranges_over_boots():
    records = [
        engine("stock", (1, 1), [2.0, 2.2, 2.1]), engine("tiles", (1, 1), [1.0, 1.1, 1.05]),
        engine("stock", (2, 2), [3.0]), engine("tiles", (2, 2), [2.0], answers="b"),
    ]  # fmt: skip
    row = summary(records)[1]
    assert row["batches"][1]["ratio_range"] == pytest.approx([1.5, 2.0]) and row["batches"][1]["ratio"] == pytest.approx(1.75)
    assert row["answers_as_stock"] == "3 of 4" and row["first_tokens_as_stock"] == [2, 2]


def test_a_stock_of_another_wave_of_the_same_pass_serves():
    records = [
        engine("stock", (1, 1), [2.0]),
        engine("tiles", (1, 2), [1.0], problems=["gone"]),
        engine("stock", (2, 3), [9.0]),
    ]
    row = next(row for row in summary(records) if row["arm"] == "tiles")
    assert row["batches"][1]["ratio"] == 2.0
    assert "NOT VALID" in next(line for line in lines([row]))


def test_a_divergence_is_a_near_tie_only_within_the_rounding_seen():
    stock = {"quality": {"16": [[-1.0, -2.0]]}, "greedy": [{"tokens": [1, 2], "best": [[-0.1, -3.0], [-0.70, -0.71]]}]}
    kernels = {"quality": {"16": [[-1.01, -2.0]]}, "greedy": [{"tokens": [1, 3], "best": []}]}
    found = judge({"stock": stock, "kernels": kernels})["kernels"]
    assert found["near_ties"] and found["equal_answers"] == "0 of 1" and found["largest_gap_nats"] == pytest.approx(0.01)
    stock["greedy"][0]["best"][1] = [-0.7, -1.7]
    assert not judge({"stock": stock, "kernels": kernels})["kernels"]["near_ties"]
