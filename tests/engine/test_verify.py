"""The checks before serving: conditions on what really came up, and the class that is really in use."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlay import fingerprint, hooks, verify
from overlay.facts import Facts, Serving

MODULE = """
class Runner:
    def step(self): return 1
class Own:
    def step(self): return 2
class Child(Runner): pass
class Overriding(Runner):
    def step(self): return 3
"""
PATCH = """
from overlay.spec import Condition, Exactness, Kind, Patch, Target
PATCH = Patch(id="p", kind=Kind.CODE, summary="s", why="w", remove_when="r", exactness=Exactness.BITWISE,
    targets=(Target("verified_target:Runner.step", "wrapper", fingerprints={"build": %r}),),
    condition=Condition(runner="V1", facts={"serving.tensor_parallel": 1}), live=("model_runner",))
def wrapper(wrapped, instance, args, kwargs):
    return 10 + wrapped(*args, **kwargs)
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "verified_target.py").write_text(MODULE)
    file = tmp_path / "p.py"
    text = PATCH % fingerprint.from_source(tmp_path, "verified_target", "Runner.step")
    file.write_text(text)

    def build(required: bool, facts: Facts | None = None, stacked: str = "", drift: bool = False) -> hooks.Hooks:
        """stacked: the condition of a q that requires p. drift: p, whose source is not the verified one, is not applied."""
        order = {"id": "p", "kind": "code", "module": f"user_{tmp_path.name}", "file": str(file), "assumes": [], "options": {}}
        order |= {"targets": ["verified_target:Runner.step"], "accept_drift": False, "process": "worker", "runner": "V1"}
        order |= {"live": ["model_runner"], "after": [], "requires": [], "after_call": "", "required": required}
        planned = facts or Facts(serving=Serving(runner="V1", tensor_parallel=1))
        patches = [order]
        if stacked:
            upper = tmp_path / "q.py"
            above = text.replace('id="p"', 'id="q"').replace("10 +", "100 +")
            above = above.replace('runner="V1", facts={"serving.tensor_parallel": 1}', stacked)
            upper.write_text(above.replace("condition=", "requires=('p',), after=('p',), condition="))
            changes = {"id": "q", "module": f"upper_{tmp_path.name}", "file": str(upper), "after": ["p"], "requires": ["p"]}
            patches.append(order | changes)
        if drift:
            file.write_text(PATCH % "another")
        armed = hooks.Hooks({"digest": "d", "runner": "V1", "patches": patches, "facts": planned.to_dict()}, None)
        armed.arm()
        __import__("verified_target")
        return armed

    yield build
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, hooks._Finder)]
    sys.modules.pop("verified_target", None)


def worker(name: str, tensor_parallel: int = 1) -> SimpleNamespace:
    parts = dict.fromkeys(("lora_config", "kv_transfer_config", "speculative_config"))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel),
        scheduler_config=SimpleNamespace(),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"architectures": ["X"]}), model="m"),
        compilation_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
        **parts,
    )
    return SimpleNamespace(model_runner=getattr(sys.modules["verified_target"], name)(), vllm_config=config)


@pytest.mark.parametrize("name", ["Runner", "Child"])
def test_a_patch_on_the_class_in_use_is_verified(make, name: str):
    armed = make(True)
    live = worker(name)
    verify.verify_worker(armed, live)
    assert armed.receipt.content["patches"]["p"]["verified"] is True
    assert live.model_runner.step() == 11


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Own", "which it does not derive from"), ("Overriding", "overrides the patched one")],
)
def test_a_patched_class_that_nobody_uses_is_not_in_force(make, name: str, reason: str):
    armed = make(True)
    with pytest.raises(hooks.Refused, match=reason):
        verify.verify_worker(armed, worker(name))
    assert armed.state("p") == "failed"


def test_a_profiles_patch_that_is_not_in_force_is_taken_back_and_said_so(make, capfd):
    armed = make(False)
    live = worker("Overriding")
    verify.verify_worker(armed, live)
    assert armed.state("p") == "failed"
    assert sys.modules["verified_target"].Runner().step() == 1
    assert "p: off in process" in capfd.readouterr().out
    assert armed.failed() == ["p"]


def test_a_patch_whose_required_one_does_not_fit_here_is_taken_back_with_it(make):
    """Both are on one function: taken back from the top, so that the original is there again."""
    armed = make(False, stacked='runner="V1"')
    live = worker("Runner", tensor_parallel=2)
    assert live.model_runner.step() == 111
    verify.verify_worker(armed, live)
    assert armed.failed() == ["p", "q"]
    reason = armed.receipt.content["patches"]["q"]["reason"]
    assert reason.startswith("it requires p, which is not in force: what came up is not what it is for: serving.tensor")
    assert live.model_runner.step() == 1


@pytest.mark.parametrize("drift", [False, True])
def test_a_patchs_own_conditions_are_named_before_one_that_it_requires(make, drift: bool):
    """Whether the required one was taken back here or was never applied."""
    armed = make(False, stacked='runner="V1", facts={"serving.lora": True}', drift=drift)
    live = worker("Runner", tensor_parallel=2)
    verify.verify_worker(armed, live)
    assert armed.failed() == ["p", "q"]
    states = armed.receipt.content["patches"]
    assert states["q"]["reason"] == "what came up is not what it is for: serving.lora is False, not True"
    assert ("its source is unknown" if drift else "serving.tensor_parallel is 2") in states["p"]["reason"]
    assert live.model_runner.step() == 1


def test_a_patch_that_fits_is_off_for_the_one_that_it_requires(make):
    armed = make(False, stacked='runner="V1"', drift=True)
    verify.verify_worker(armed, worker("Runner"))
    assert armed.receipt.content["patches"]["q"]["reason"].startswith("it requires p, which is not in force: ApplyError: p")


def test_a_named_patch_is_refused_with_its_own_condition(make):
    with pytest.raises(hooks.Refused, match="q: not in force .*: what came up is not what it is for: serving.lora"):
        verify.verify_worker(
            make(True, stacked='runner="V1", facts={"serving.lora": True}'), worker("Runner", tensor_parallel=2)
        )


def test_conditions_are_checked_again_on_what_came_up(make):
    armed = make(True)
    with pytest.raises(hooks.Refused, match="serving.tensor_parallel is 2"):
        verify.verify_worker(armed, worker("Runner", tensor_parallel=2))


def test_conditions_that_only_the_process_can_tell_are_checked_there(make):
    unknown = Facts(serving=Serving())  # another program than the server: the plan knew nothing
    armed = make(True, unknown)
    verify.verify_worker(armed, worker("Runner"))
    assert armed.receipt.content["patches"]["p"]["verified"] is True


def core(reports: list[dict]) -> SimpleNamespace:
    return SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=lambda method: reports))


def report(pid: int, digest: str = "d", state: str = "applied") -> dict:
    return {"pid": pid, "rank": pid, "host": "h", "digest": digest, "patches": {"p": {"state": state}}}


def test_workers_of_another_plan_or_in_another_state_stop_the_engine(make):
    armed = make(True)
    verify.verify_workers(armed, core([report(1), report(2)]))
    with pytest.raises(hooks.Refused, match="runs plan other"):
        verify.verify_workers(armed, core([report(1), report(2, digest="other")]))
    with pytest.raises(hooks.Refused, match="disagree on p"):
        verify.verify_workers(armed, core([report(1), report(2, state="failed")]))


def test_an_engine_core_that_left_no_receipt_stops_the_api_server(make, tmp_path: Path):
    armed = make(True)
    armed.folder = str(tmp_path)
    client = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[SimpleNamespace(pid=1)])))
    with pytest.raises(hooks.Refused, match="engine core 1 runs without"):
        verify.verify_engines(armed, client)


def test_the_v2_runner_is_told_by_its_package():
    kind = type("GPUModelRunner", (), {"__module__": "vllm.v1.worker.gpu.model_runner"})
    assert verify._runner_kind(kind()) == "V2"
    assert verify._runner_kind(type("GPUModelRunner", (), {"__module__": "vllm.v1.worker.gpu_model_runner"})()) == "V1"
    assert verify._runner_kind(types.SimpleNamespace()) == "V1"
