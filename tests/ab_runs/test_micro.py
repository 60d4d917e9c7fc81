"""The micro layer on functions of known speed and meaning, and on the real block table of the installed build."""

import contextlib
import time

import numpy as np
import pytest

from ab_runs import cli, micro
from ab_runs.micro import Case, Work
from ab_runs.spec import SpecError

STATE = {"patched": False, "wrong": False}


@contextlib.contextmanager
def applied():
    STATE["patched"] = True
    try:
        yield
    finally:
        STATE["patched"] = False


def wait(microseconds):
    end = time.perf_counter_ns() + 1000 * microseconds
    while time.perf_counter_ns() < end:
        pass


def build():
    out = np.zeros(4, np.int64)
    steps = {"n": 0}

    def step():
        steps["n"] += 1
        wait(100 if STATE["patched"] else 200)
        out[:] = steps["n"]
        if STATE["patched"] and STATE["wrong"] and steps["n"] == 7:
            out[2] += 1

    return Work(step, lambda: {"out": out})


def test_a_b_a_gives_the_speedup_the_drift_and_the_bound_for_a_step():
    found = micro.compare(Case("demo", build, per_step=4), applied, 0.05, step_ms=8.0)
    assert found.speedup == pytest.approx(2, rel=0.35) and abs(found.drift) < 0.35
    assert found.a1 == pytest.approx(200, rel=0.35) and found.b == pytest.approx(100, rel=0.35)
    share = (found.a1 + found.a2) / 2 * 4 / 8000
    assert found.bound == pytest.approx(micro.amdahl(share, found.speedup))
    assert 1.02 < found.bound < 1.1
    assert not STATE["patched"]


def test_the_bound_of_a_fast_kernel_in_a_small_share_is_small():
    assert micro.amdahl(0.002, 1e9) == pytest.approx(1.002, abs=1e-4)
    assert micro.amdahl(1.0, 1.08) == pytest.approx(1.08)
    assert micro.amdahl(0.5, 2.0) == pytest.approx(4 / 3)


def test_one_wrong_integer_in_one_step_is_found_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(micro, "CHECKED_STEPS", 10)
    micro.check(Case("demo", build), applied, exact=True)
    monkeypatch.setitem(STATE, "wrong", True)
    with pytest.raises(
        SpecError, match="demo: step 6: out: the patch changes it: 1 of 4 values differ, the first at .2."
    ):
        micro.check(Case("demo", build), applied, exact=False)


def test_floats_are_compared_as_the_class_of_exactness_asks():
    one = np.array([1.0, 0.0, np.nan], np.float32)
    close = one + np.float32(1e-6)
    assert micro.differs(one, one.copy(), exact=True) is None
    assert "values differ" in micro.differs(one, close, exact=True)
    assert micro.differs(one, close, exact=False) is None
    assert "largest difference" in micro.differs(one, one + 1, exact=False)
    assert micro.differs(np.float32(0.0), np.float32(-0.0), exact=True)
    assert "float32[3] against float64[3]" in micro.differs(one, one.astype(np.float64), exact=False)
    assert "int64[2] against int64[3]" in micro.differs(np.arange(2), np.arange(3), exact=False)


def test_what_cannot_be_timed_is_said(capsys):
    assert cli.main(["micro", "no-such-patch"]) == 2
    assert "is no patch; there are" in capsys.readouterr().err
    assert cli.main(["micro", "spec-capture-sizes"]) == 2
    assert "has no functions to time" in capsys.readouterr().err
    with pytest.raises(SpecError, match="has no micro cases: write ab_runs/micro_cases/none_such.py"):
        micro.find_cases("none-such", object())


def test_the_block_table_of_the_installed_build_is_compared_and_timed(capsys):
    pytest.importorskip("vllm")
    assert cli.main(["micro", "block-table-dirty", "--seconds", "0.1", "--step-ms", "10", "--json"]) == 0
    import json

    found = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in found["results"]][1] == "decode, 8 requests of 32k, 1 group"
    for row in found["results"]:
        assert row["hits"] > 0 and row["a1"] > 0 and 0.9 < row["bound"] < 1.2


def test_a_block_table_patch_that_skips_too_much_is_caught(monkeypatch):
    """Break the patch: it forgets that a row was appended. The check must see the stale device rows."""
    pytest.importorskip("vllm")
    import patches.common.block_table_dirty as broken
    from overlay.catalog import load_catalog

    entry = load_catalog()["block-table-dirty"]
    monkeypatch.setattr(broken, "append_row", lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    import vllm

    from ab_runs.micro_cases import block_table_dirty as cases

    version = vllm.__version__.partition("+")[0]
    case = next(iter(cases.cases("cpu")))
    with pytest.raises(SpecError, match="the patch changes it"):
        micro.check(case, lambda: micro.applying(entry, version), exact=True)
