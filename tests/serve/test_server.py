"""The real server through ``launch.py``: drop-in, and proven in every process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay import fingerprint
from overlay.ledger import read_run
from tests.server import CHECKPOINT, ENVIRONMENT, Server
from tests.support import ROOT

pytestmark = pytest.mark.serve

PROMPTS = [
    "The capital of France is",
    "Write a haiku about the sea.\n",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the river, there lived a",
]
# request mixes that reach different code of the runner
MIXES = [
    {},
    {"min_tokens": 8},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logit_bias": {"260": 3.0}, "logprobs": 3},
    {"stop": ["\n"]},
]


def answers(server: Server) -> list[list[int]]:
    """Token ids of every prompt under every mix, one request at a time, the last prompts past a block boundary."""
    found = [server.complete(prompt, 12, **mix)["token_ids"] for mix in MIXES for prompt in PROMPTS]
    return found + [server.complete("word " * 300, 40, min_tokens=40)["token_ids"]]


USER_CODE = '''
"""A user's own code patch: counts schedules."""
from overlay.runtime import Counters
from overlay.spec import ENGINE, Exactness, Kind, Patch, Target
PATCH = Patch(id="count-schedules", kind=Kind.CODE, summary="s", why="w", remove_when="never", exactness=Exactness.BITWISE,
    targets=(Target("vllm.v1.core.sched.scheduler:Scheduler.schedule", "schedule", fingerprints={{"here": "{digest}"}}),),
    process=ENGINE)
count = Counters("count-schedules")
def schedule(wrapped, instance, args, kwargs):
    count.hit()
    return wrapped(*args, **kwargs)
'''
USER_MODULE = '''
"""A user's own module patch: another file for one of vLLM's."""
from overlay.spec import Exactness, Kind, Patch, Target
PATCH = Patch(id="own-bad-words", kind=Kind.MODULE, summary="s", why="w", remove_when="never", exactness=Exactness.BITWISE,
    targets=(Target("vllm.v1.sample.ops.bad_words", "own_bad_words.py", fingerprints={{"here": "{digest}"}}),))
'''


def vllm_root() -> Path:
    from overlay.detect.build import find_build

    return Path(find_build()[0].root).parent


def user_patches(folder: Path) -> Path:
    """A folder with one code and one module patch for the installed vLLM."""
    folder.mkdir(exist_ok=True)
    root = vllm_root()
    digest = fingerprint.from_source(root, "vllm.v1.core.sched.scheduler", "Scheduler.schedule")
    (folder / "count_schedules.py").write_text(USER_CODE.format(digest=digest))
    original = root / "vllm/v1/sample/ops/bad_words.py"
    (folder / "bad_words_patch.py").write_text(USER_MODULE.format(digest=fingerprint.of_file(original)))
    (folder / "own_bad_words.py").write_text(original.read_text() + "\nOWN = True\n")
    return folder


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    """The stock server's answers."""
    with Server(["--overlay-config", str(ROOT / "configs/off.yaml")]).wait_healthy() as server:
        environ = Path(f"/proc/{server.process.pid}/environ").read_text().split("\0")
        assert not [v for v in environ if v.startswith(("OVERLAY_PLAN", "OVERLAY_RUN", "PYTHONPATH"))], environ
        assert server.get("/overlay").status_code == 404
        assert not list(server.run.parent.glob("run/receipt-*"))
        return answers(server)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with the shipped patches, a user's own, another ``sitecustomize`` and a filter on vLLM's plugins."""
    folder = tmp_path_factory.mktemp("user")
    patches = user_patches(folder / "mine")
    (folder / "sitecustomize.py").write_text(f"open({str(folder / 'theirs-ran')!r}, 'a').write('x')\n")
    environ = {"PYTHONPATH": str(folder), "VLLM_PLUGINS": "somebody_elses"}
    flags = ["--overlay-patch-dir", str(patches), "--overlay-patches", "+block-table-dirty,+count-schedules,+own-bad-words"]
    with Server(flags, environ=environ) as server:
        server.user = folder
        yield server.wait_healthy()


def test_answers_equal_the_stock_servers_and_every_process_proves_the_plan(patched: Server, stock: list[list[int]]):
    assert answers(patched) == stock
    receipts, counters = read_run(str(patched.run))
    by_role = {receipt["role"]: receipt for receipt in receipts}
    assert {"api", "engine", "worker"} <= set(by_role)
    assert len({receipt["pid"] for receipt in by_role.values()}) == len(by_role)
    plan = json.loads((patched.run / "plan.json").read_text())
    assert {receipt["digest"] for receipt in receipts} == {plan["digest"]}
    worker, engine, api = by_role["worker"], by_role["engine"], by_role["api"]
    assert worker["patches"]["block-table-dirty"]["state"] == "applied"
    assert worker["patches"]["block-table-dirty"]["verified"] is True
    assert worker["runner"] == "V1" and worker["runner_class"].endswith("CPUModelRunner")
    assert engine["patches"]["count-schedules"]["state"] == "applied"
    assert engine["workers"] == [worker["pid"]] and api["engines"] == [engine["pid"]]
    counted = counters[worker["pid"]]["block-table-dirty"]
    assert counted["hit"] > 100 and counted["refused: changed"] > 10
    assert counters[engine["pid"]]["count-schedules"]["hit"] > 100


def test_hit_counters_rise_with_requests_and_show_in_metrics_and_endpoint(patched: Server):
    def hits() -> float:
        text = patched.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("vllm_overlay_events_total")]
        ours = [line for line in lines if 'patch="block-table-dirty"' in line and 'event="hit"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in ours)

    before = hits()
    patched.complete("One more question: why", 16, min_tokens=16)
    assert hits() > before
    report = patched.get("/overlay").json()
    assert {process["role"] for process in report["processes"]} >= {"api", "engine", "worker"}
    assert {p["id"]: p["verdict"] for p in report["patches"]}["block-table-dirty"] == "apply"
    assert "PYTHONPATH" not in json.dumps(report) and "capital of France" not in json.dumps(report)


def test_a_users_module_patch_is_loaded_in_the_worker(patched: Server):
    worker = next(r for r in read_run(str(patched.run))[0] if r["role"] == "worker")
    assert worker["patches"]["own-bad-words"]["state"] == "applied"


def test_another_sitecustomize_ran_in_every_process(patched: Server):
    assert len((patched.user / "theirs-ran").read_text()) >= 3


def test_the_process_is_the_server_and_ends_as_stock_ends(patched: Server):
    command = Path(f"/proc/{patched.process.pid}/cmdline").read_text().replace("\0", " ")
    title = Path(f"/proc/{patched.process.pid}/comm").read_text()
    assert "launch.py" not in command and ("serve" in command or "VLLM" in title.upper()), command
    assert patched.stop(signal.SIGINT) == 0
    assert "Traceback" not in patched.log.split("Shutting down")[-1]


UNBOOTSTRAPPED = """
import os
level = int(os.environ.get("TEST_LEVEL", "0")) + 1
os.environ["TEST_LEVEL"] = str(level)
if level == {level}:  # 1: the launcher, 2: the API server, 3: the engine core. What it starts loses the bootstrap.
    os.environ.pop("PYTHONPATH", None)
"""


@pytest.mark.parametrize(
    ("level", "message"),
    [(2, "runs without the overlay's bootstrap: it left no receipt"), (3, "a worker runs without the overlay's bootstrap")],
    ids=["engine", "worker"],
)
def test_a_process_without_the_bootstrap_stops_the_server(tmp_path: Path, level: int, message: str):
    (tmp_path / "sitecustomize.py").write_text(UNBOOTSTRAPPED.format(level=level))
    with Server(["--overlay-patches", "+block-table-dirty"], environ={"PYTHONPATH": str(tmp_path)}) as server:
        assert server.process.wait(timeout=400) == 78, server.log[-3000:]
        assert message in server.log


AT = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model"
THROWS = '''
from overlay.spec import REPLACE, Exactness, Kind, Patch, Target
PATCH = Patch(id="throws", kind=Kind.CODE, summary="s", why="w", remove_when="never", exactness=Exactness.BITWISE,
    targets=(Target("{at}", "broken", REPLACE, fingerprints={{"here": "{digest}"}}),))
def broken(original):
    raise RuntimeError("it throws")
'''


def test_a_named_patch_that_throws_in_the_process_stops_the_server(tmp_path: Path):
    digest = fingerprint.from_source(vllm_root(), *AT.split(":"))
    (tmp_path / "throws.py").write_text(THROWS.format(at=AT, digest=digest))
    with Server(["--overlay-patch-dir", str(tmp_path), "--overlay-patches", "+throws"]) as server:
        assert server.process.wait(timeout=400) == 78, server.log[-3000:]
        assert "throws: not in force in process" in server.log and "it throws" in server.log


OFFLINE = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=512, gpu_memory_utilization=0.15, max_num_seqs=4)
    out = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=12))
    print("IDS", list(out[0].outputs[0].token_ids))
"""


def test_an_offline_program_runs_under_the_same_patches(tmp_path: Path, stock: list[list[int]]):
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    command = [sys.executable, str(ROOT / "launch.py"), "--overlay-patches", "+block-table-dirty"]
    command += ["--overlay-run-dir", str(tmp_path / "run"), "--overlay-exec", "--"]
    command += [sys.executable, str(script), str(CHECKPOINT)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    ids = next(line for line in done.stdout.splitlines() if line.startswith("IDS"))
    assert ids == f"IDS {stock[0]}"
    receipts, counters = read_run(str(tmp_path / "run"))
    worker = next(r for r in receipts if "worker" in r["role"])
    assert worker["patches"]["block-table-dirty"]["verified"] is True
    assert counters[worker["pid"]]["block-table-dirty"]["hit"] > 5


@pytest.mark.parametrize("config", [[], ["--overlay-config", str(ROOT / "configs/off.yaml")]], ids=["patched", "stock"])
def test_vllms_other_commands_run_on_a_build_of_another_distribution(config: list[str]):
    command = [sys.executable, str(ROOT / "launch.py"), *config, "--overlay-exec", "--"]
    command += [str(Path(sys.executable).parent / "vllm"), "--version"]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1].startswith("0.32.0")
