"""The vendor plugin's layout: a worker that instantiates the plugin's own copy of the runner, not upstream's class.

A stand-in package ``vllm_hcu`` is written as the plugin's public material describes it. The real patches go onto the installed
vLLM's real classes; the stand-in's worker never uses them, so no patch on them may be reported in force.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = {
    "vllm_hcu/__init__.py": "def register():\n    return 'vllm_hcu.platform.HcuPlatform'\n",
    "vllm_hcu/v1/__init__.py": "",
    "vllm_hcu/v1/hcu_model_runner.py": """
        class GPUModelRunner:  # the plugin's own copy: no subclass of upstream's
            def __init__(self):
                from vllm.v1.worker.block_table import MultiGroupBlockTable
                self.input_batch = None
            def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
                return "the plugin's own"
            def _dummy_run(self, *args, **kwargs):
                return "the plugin's own"
        """,
    "vllm_hcu/v1/derived_runner.py": """
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Upstream
        class GPUModelRunner(Upstream):  # another plugin's way: a subclass that overrides what is patched
            def __init__(self):
                pass
            def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
                return "the plugin's own"
        """,
    "vllm_hcu-0.28.0+das.1a2b3c4.dtk2604.dist-info/METADATA": "Name: vllm_hcu\nVersion: 0.28.0+das.1a2b3c4.dtk2604\n",
    "vllm_hcu-0.28.0+das.1a2b3c4.dtk2604.dist-info/entry_points.txt": (
        "[vllm.platform_plugins]\nhcu = vllm_hcu:register\n\n[vllm.general_plugins]\nhcu_model = vllm_hcu:register\n"
    ),
}
PROGRAM = """
import json, os, sys
from types import SimpleNamespace
from overlay import hooks, verify
from overlay.catalog import load_catalog

patch, runners = sys.argv[1], sys.argv[2:]
entry = load_catalog()[patch]
import vllm
from overlay.versions import in_range
here = vllm.__version__.partition("+")[0]
wanted = [t.at for t in entry.patch.targets if not t.versions or in_range(here, t.versions)]
order = {"id": patch, "kind": "code", "module": entry.module, "file": str(entry.file), "targets": wanted, "assumes": [],
         "options": {}, "accept_drift": False, "process": "worker", "runner": "V1", "live": list(entry.patch.live),
         "after": [], "requires": [], "after_call": "", "required": True}
armed = hooks.Hooks({"digest": "d", "runner": "V1", "patches": [order]}, None)
armed.arm()
import importlib
for at in wanted:
    importlib.import_module(at.partition(":")[0])
applied = armed.state(patch)
for runner in runners:
    if os.fork():  # each in a process of its own: a failure latches
        os.wait()
        continue
    module = importlib.import_module(runner)
    worker = SimpleNamespace(model_runner=module.GPUModelRunner.__new__(module.GPUModelRunner))
    try:
        verify.verify_worker(armed, worker)
        refused = ""
    except hooks.Refused as error:
        refused = str(error)
    content = armed.receipt.content
    print("ANSWER" + json.dumps({"applied": applied, "refused": refused, "state": content["patches"][patch],
                                 "runner": content["runner_class"], "kind": content["runner"]}), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    for name, text in PACKAGE.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return folder


OWN, DERIVED, UPSTREAM = "vllm_hcu.v1.hcu_model_runner", "vllm_hcu.v1.derived_runner", "vllm.v1.worker.gpu_model_runner"


@pytest.fixture(scope="module")
def answers(plugin):
    """What the check before serving says of decode-input-prep, by the module of the runner that the worker uses."""
    pytest.importorskip("vllm")
    runners = [OWN, DERIVED, UPSTREAM]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "decode-input-prep", *runners],
        capture_output=True, text=True, cwd=plugin, timeout=600,
        env={"PYTHONPATH": f"{ROOT}:{plugin}", "PATH": "/usr/bin:/bin", "VLLM_PLUGINS": "", "HOME": str(plugin)},
    )  # fmt: skip
    lines = [line[len("ANSWER") :] for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert len(lines) == len(runners), done.stderr[-3000:]
    return dict(zip(runners, map(json.loads, lines), strict=True))


def test_a_patch_on_upstreams_runner_is_not_in_force_under_the_plugins_own(answers):
    answer = answers[OWN]
    assert answer["applied"] == "applied"  # upstream's class carries the patch, and nobody uses it
    assert answer["state"]["state"] == "failed" and not answer["state"].get("verified")
    assert "vllm_hcu.v1.hcu_model_runner:GPUModelRunner" in answer["refused"]
    assert "does not derive from" in answer["refused"]
    assert answer["runner"] == "vllm_hcu.v1.hcu_model_runner:GPUModelRunner" and answer["kind"] == "V1"


def test_a_patch_that_a_plugins_subclass_overrides_is_not_in_force(answers):
    assert answers[DERIVED]["state"]["state"] == "failed" and "overrides the patched one" in answers[DERIVED]["refused"]


def test_upstreams_own_runner_is(answers):
    """The control: the same check passes where the patched class is the one in use."""
    assert answers[UPSTREAM]["refused"] == "" and answers[UPSTREAM]["state"]["verified"] is True


def test_the_plugin_is_a_fact_with_its_version(plugin):
    from overlay.detect.build import find_build

    (plugin / "vllm").mkdir(exist_ok=True)
    (plugin / "vllm" / "__init__.py").write_text("")
    found, _ = find_build([str(plugin)])
    (plugin / "vllm" / "__init__.py").unlink()
    (plugin / "vllm").rmdir()
    assert found.plugins == {"vllm_hcu": "0.28.0+das.1a2b3c4.dtk2604"}
    assert found.entry_points["vllm.platform_plugins"] == ("hcu = vllm_hcu:register",) and found.vendor == "hygon"
