"""The bootstrap and the import hooks, each case in a clean interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlay import fingerprint
from overlay.bootstrap.arm import pack
from tests.support import ROOT

BOOTSTRAP = ROOT / "overlay" / "bootstrap"

PATCH = """
from overlay.runtime import Counters
from overlay.spec import Exactness, Kind, Patch, Target
PATCH = Patch(id="{id}", kind=Kind.{kind}, summary="s", why="w", remove_when="r", exactness=Exactness.BITWISE,
    targets=({targets}))
count = Counters("{id}")
def wrapper(wrapped, instance, args, kwargs):
    count.hit()
    return wrapped(*args, **kwargs) + " patched"
def broken(original):
    raise RuntimeError("this patch cannot be applied")
"""


class Bench:
    """A folder with target modules, a patch, and orders for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.site = folder / "site"
        self.site.mkdir()
        (self.site / "one.py").write_text('def f(): return "one"\n')
        (self.site / "two.py").write_text('class T:\n    def g(self): return "two"\n')
        (self.site / "binder.py").write_text("from one import f\n")
        (self.site / "late.py").write_text('def ready(): return "ready"\n')
        self.orders: list[dict] = []

    def target(self, at: str, use: str = "wrapper", how: str = "wrap", digest: str | None = None) -> str:
        module, _, name = at.partition(":")
        digest = digest or fingerprint.from_source(self.site, module, name)
        return f"Target({at!r}, {use!r}, {how!r}, {{'build': {digest!r}}}),"

    def add(self, id: str, *targets: str, kind: str = "code", **more) -> None:
        file = self.folder / f"{id.replace('-', '_')}.py"
        file.write_text(PATCH.format(id=id, kind=kind.upper(), targets="".join(targets)))
        names = [target.split("'")[1] for target in targets]
        order = {"id": id, "kind": kind, "module": f"user_{file.stem}", "file": str(file), "targets": names, "assumes": []}
        order |= {
            "options": {},
            "accept_drift": False,
            "process": "worker",
            "runner": "",
            "live": [],
            "after": [],
            "requires": [],
        }
        self.orders.append(order | {"after_call": "", "required": True} | more)

    def python(
        self, code: str, *flags: str, env: dict | None = None, plan: bool = True, path: tuple = ()
    ) -> subprocess.CompletedProcess:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), *map(str, path), str(self.site)])}
        environ["OVERLAY_RUN_DIR"] = str(self.run)
        if plan:
            environ["OVERLAY_PLAN"] = pack({"digest": "d1", "patches": self.orders, "runner": "V1"})
        command = [sys.executable, *flags, "-c", code]
        return subprocess.run(command, env={**environ, **(env or {})}, capture_output=True, text=True, cwd=self.folder)

    def receipt(self) -> dict:
        (file,) = self.run.glob("receipt-*.json")
        return json.loads(file.read_text())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_patch_is_in_force_before_anyone_binds_the_name(bench: Bench):
    bench.add("p", bench.target("one:f"))
    done = bench.python("import binder; print(binder.f())")
    assert done.stdout == "one patched\n", done.stderr
    assert bench.receipt()["patches"]["p"]["state"] == "applied"


@pytest.mark.parametrize(
    "code", ["import one, two", "import two, one", "from one import f; import two", "import two; from one import f"]
)
def test_targets_in_two_modules_apply_together_in_any_order_of_import(bench: Bench, code: str):
    bench.add("p", bench.target("one:f"), bench.target("two:T.g"))
    if code.startswith("from one"):
        # bound before the second module came: the name held elsewhere is an error, never a patch that only seems in force
        done = bench.python(code + "; import one; print(f(), one.f(), two.T().g())")
        assert done.stdout == "one one two\n"
        assert "__main__.f still holds the original" in bench.receipt()["patches"]["p"]["reason"]
        return
    done = bench.python(code + "; import one; print(one.f(), two.T().g())")
    assert done.stdout == "one patched two patched\n", done.stderr


def test_a_patch_waits_while_a_module_of_it_is_missing(bench: Bench):
    bench.add("p", bench.target("one:f"), bench.target("two:T.g"))
    assert bench.python("import one; print(one.f())").stdout == "one\n"
    assert bench.receipt()["patches"]["p"]["state"] == "waiting"


def test_a_patch_that_throws_is_rolled_back_and_latched(bench: Bench):
    bench.add("p", bench.target("two:T.g"), bench.target("one:f", "broken", "replace"))
    done = bench.python("import one, two; print(one.f(), two.T().g())")
    assert done.stdout == "one two\n"
    state = bench.receipt()["patches"]["p"]
    assert state["state"] == "failed" and "this patch cannot be applied" in state["reason"]
    assert "p: not applied" in done.stderr


def test_a_target_of_unknown_source_is_left_alone(bench: Bench):
    bench.add("p", bench.target("one:f", digest="0123456789abcdef"))
    assert bench.python("import one; print(one.f())").stdout == "one\n"
    assert "its source is unknown: found" in bench.receipt()["patches"]["p"]["reason"]


def test_a_target_imported_before_the_hooks_is_an_error(bench: Bench):
    bench.add("p", bench.target("one:f"))
    code = "import one; from overlay.bootstrap.arm import arm; import os; arm(os.environ['LATE']); from overlay import hooks; "
    code += "print(hooks.ARMED.receipt.content['patches']['p'])"
    late = pack({"digest": "d1", "patches": bench.orders, "runner": "V1"})
    done = bench.python(code, plan=False, env={"LATE": late, "PYTHONPATH": f"{bench.site}{os.pathsep}{ROOT}"})
    assert "one was imported before the hooks were armed" in done.stdout, done.stderr


def test_a_module_patch_loads_its_file_on_the_known_original_only(bench: Bench):
    (bench.folder / "new_one.py").write_text('def f(): return "new"\n')
    known = fingerprint.of_file(bench.site / "one.py")
    bench.add("p", bench.target("one", "new_one.py", digest=known), kind="module")
    assert bench.python("import binder; print(binder.f())").stdout == "new\n"
    assert bench.receipt()["patches"]["p"]["state"] == "applied"
    (bench.site / "one.py").write_text('def f(): return "hotfixed"\n')
    for file in bench.run.iterdir():
        file.unlink()
    done = bench.python("import binder; print(binder.f())")
    assert done.stdout == "hotfixed\n"
    assert bench.receipt()["patches"]["p"]["state"] == "failed"


def test_a_patch_can_wait_for_a_call(bench: Bench):
    bench.add("p", bench.target("one:f"), after_call="late:ready")
    done = bench.python("import one, late; print(one.f()); late.ready(); print(one.f()); late.ready(); print(one.f())")
    assert done.stdout == "one\none patched\none patched\n", done.stderr


def test_stacked_patches_apply_in_their_order_whatever_comes_first(bench: Bench):
    bench.add("upper", bench.target("two:T.g"), after=["lower"])
    bench.add("lower", bench.target("two:T.g"), bench.target("one:f"))
    done = bench.python("import two, one; print(two.T().g())")
    assert done.stdout == "two patched patched\n", done.stderr
    assert [bench.receipt()["patches"][p]["state"] for p in ("upper", "lower")] == ["applied", "applied"]


def test_what_a_patch_assumes_may_still_be_running_when_its_target_is_imported(bench: Bench):
    """As a runner's module imports the sampler's: the runner's names come later than the patched module."""
    (bench.site / "upper.py").write_text("import one\nclass Runner:\n    def run(self): return one.f()\n")
    digest = fingerprint.from_source(bench.site, "upper", "Runner.run")
    bench.add("p", bench.target("one:f"), assumes=["upper:Runner.run"])
    file = bench.folder / "p.py"
    assumed = f"assumes=(Target('upper:Runner.run', fingerprints={{'build': {digest!r}}}),),"
    file.write_text(file.read_text().replace("    targets=", f"    {assumed}\n    targets="))
    done = bench.python("import upper; print(upper.Runner().run())")
    assert done.stdout == "one patched\n", done.stderr
    assert bench.receipt()["patches"]["p"]["fingerprints"]["upper:Runner.run"] == digest
    alone = bench.python("import one; print(one.f())")
    assert alone.stdout == "one\n", "applied without what it assumes"


def test_a_patch_is_not_applied_without_one_that_it_requires(bench: Bench):
    bench.add("needs", bench.target("two:T.g"), requires=["broken"])
    bench.add("broken", bench.target("one:f", use="broken", how="replace"))
    done = bench.python("import two, one; print(two.T().g(), one.f())")
    assert done.stdout == "two one\n", done.stderr
    states = bench.receipt()["patches"]
    assert states["needs"]["state"] == "failed"
    assert "it requires broken, which is not in force: ApplyError: broken" in states["needs"]["reason"]


def test_another_sitecustomize_still_runs(bench: Bench):
    bench.add("p", bench.target("one:f"))
    other = bench.folder / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins; builtins.THEIRS = 'theirs ran'; MARK = 5\n")
    done = bench.python("import sitecustomize, one; print(THEIRS, sitecustomize.MARK, one.f())", path=(other,))
    assert done.stdout == "theirs ran 5 one patched\n", done.stderr
    done = bench.python("import sitecustomize; print(THEIRS)", path=(other,), plan=False)
    assert done.stdout == "theirs ran\n", done.stderr


def test_an_interpreter_that_imports_no_target_loads_nothing_of_ours(bench: Bench):
    bench.add("p", bench.target("one:f"))
    done = bench.python("import sys; print([n for n in sys.modules if n.startswith(('overlay', 'patches', 'json'))])")
    assert done.stdout == "[]\n"
    assert not bench.run.exists()


def test_without_a_plan_nothing_of_ours_is_imported(bench: Bench):
    done = bench.python("import sys; print([n for n in sys.modules if n.startswith(('overlay', 'patches'))])", plan=False)
    assert done.stdout == "[]\n"


def test_a_foreign_package_of_our_name_is_an_error_that_names_both(bench: Bench):
    foreign = bench.site / "patches"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("")
    bench.add("p", bench.target("one:f"))
    done = bench.python("import one; print('served')")
    assert done.returncode == 78 and done.stdout == ""
    assert str(foreign) in done.stderr and str(ROOT) in done.stderr


def test_a_mere_folder_of_our_name_is_none(bench: Bench):
    (bench.site / "patches").mkdir()
    (bench.folder / "overlay").mkdir()
    bench.add("p", bench.target("one:f"))
    assert bench.python("import one; print(one.f())").stdout == "one patched\n"


def test_a_broken_plan_ends_the_process(bench: Bench):
    done = bench.python("import one; print('served')", env={"OVERLAY_PLAN": "one,two;rubbish"})
    assert done.returncode == 78 and done.stdout == "" and "cannot be patched" in done.stderr


def test_the_second_way_in_notices_that_the_first_did_not_run(bench: Bench):
    code = f"import sys; sys.path.insert(0, {str(BOOTSTRAP)!r}); import vllm_overlay_plugin; "
    code += "vllm_overlay_plugin.register(); print('served')"
    done = bench.python(code, "-E", env={"OVERLAY_PLAN": pack({"digest": "d1", "patches": []})})
    assert done.returncode == 78 and "started without the bootstrap" in done.stderr
    bench.add("p", bench.target("one:f"))
    done = bench.python("import one, vllm_overlay_plugin; vllm_overlay_plugin.register(); print('served')")
    assert done.stdout == "served\n", done.stderr


def test_the_plugin_is_found_through_its_dist_info(bench: Bench):
    code = "from importlib.metadata import entry_points; print([e.value for e in entry_points(group='vllm.general_plugins')])"
    assert "vllm_overlay_plugin:register" in bench.python(code).stdout
    code = code.replace("general_plugins", "logits_processors")
    assert bench.python(code).stdout == "[]\n"


def test_forked_and_spawned_children_have_receipts_and_counters_of_their_own(bench: Bench):
    bench.add("p", bench.target("one:f"))
    (bench.site / "work.py").write_text(
        "import multiprocessing, one\n"
        "def go(): [one.f() for _ in range(3)]\n"
        "if __name__ == '__main__':\n"
        "    one.f()\n"
        "    for way in ('fork', 'spawn'):\n"
        "        child = multiprocessing.get_context(way).Process(target=go); child.start(); child.join()\n"
    )
    script = subprocess.run(
        [sys.executable, str(bench.site / "work.py")],
        env={
            **os.environ,
            "PYTHONPATH": f"{BOOTSTRAP}{os.pathsep}{bench.site}",
            "OVERLAY_RUN_DIR": str(bench.run),
            "OVERLAY_PLAN": pack({"digest": "d1", "patches": bench.orders, "runner": "V1"}),
        },
        capture_output=True,
        text=True,
    )
    assert script.returncode == 0, script.stderr
    from overlay.ledger import read_run

    _, counters = read_run(str(bench.run))
    hits = sorted(count["p"]["hit"] for count in counters.values() if "p" in count)
    assert hits == [1, 3, 3], hits
