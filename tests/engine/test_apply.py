"""A patch is in force as a whole or not at all, and taking it back leaves nothing."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from overlay import fingerprint
from overlay.apply import MARK, Application, ApplyError
from overlay.spec import REPLACE, WRAP, Exactness, Kind, Patch, Target

SOURCE = """
class Base:
    def inherited(self): return "base"

class Thing(Base):
    def method(self, x): return x
    @classmethod
    def make(cls): return cls.__name__
    @staticmethod
    def plain(x): return x

def function(x): return x
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "patched_target.py").write_text(SOURCE)
    yield importlib.import_module("patched_target")
    sys.modules.pop("patched_target", None)
    sys.modules.pop("early_binder", None)


def digest(name: str) -> str:
    return fingerprint.digest_of(fingerprint.find_definition(SOURCE, name))


def patch(*targets: Target, id: str = "a-patch", after: tuple[str, ...] = ()) -> Patch:
    return Patch(id, Kind.CODE, "s", "w", "r", Exactness.BITWISE, targets=targets, after=after)


def to(name: str, use: str = "wrapper", how: str = WRAP, known: str | None = None) -> Target:
    return Target(f"patched_target:{name}", use, how, {"build 1": known or digest(name)})


def functions(**more) -> types.SimpleNamespace:
    def wrapper(wrapped, instance, args, kwargs):
        return ("patched", wrapped(*args, **kwargs))

    def factory(original):
        def replaced(*args, **kwargs):
            return ("replaced", original(*args, **kwargs))

        return replaced

    def broken(original):
        raise RuntimeError("no")

    return types.SimpleNamespace(wrapper=wrapper, factory=factory, broken=broken, **more)


def snapshot(module) -> dict:
    return {name: vars(module.Thing).get(name) for name in ("method", "make", "plain", "inherited")} | {"f": module.function}


def test_methods_of_every_kind_are_patched_and_put_back(target):
    before = snapshot(target)
    application = Application(patch(to("Thing.method"), to("Thing.make"), to("Thing.plain"), to("function")), functions())
    application.apply()
    thing = target.Thing()
    assert thing.method(1) == ("patched", 1)
    assert target.Thing.make() == ("patched", "Thing")
    assert thing.plain(2) == ("patched", 2)
    assert target.function(3) == ("patched", 3)
    assert application.in_force() is None
    application.rollback()
    assert snapshot(target) == before


def test_a_replacement_is_a_plain_function(target):
    application = Application(patch(to("Thing.method", "factory", REPLACE), to("Thing.plain", "factory", REPLACE)), functions())
    application.apply()
    assert isinstance(vars(target.Thing)["method"], types.FunctionType)
    assert target.Thing().method(1) == ("replaced", 1)
    assert target.Thing.plain(1) == ("replaced", 1)
    application.rollback()
    assert target.Thing().method(1) == 1


def test_a_patch_that_throws_while_applying_leaves_nothing_behind(target):
    before = snapshot(target)
    with pytest.raises(ApplyError, match="function.*RuntimeError: no"):
        Application(patch(to("Thing.method"), to("function", "broken", REPLACE)), functions()).apply()
    assert snapshot(target) == before


def test_every_target_is_validated_before_any_changes(target):
    before = snapshot(target)
    with pytest.raises(ApplyError, match="found .* verified: 0123"):
        Application(patch(to("Thing.method"), to("function", known="0123")), functions()).apply()
    assert snapshot(target) == before


def test_drift_is_accepted_by_name_only(target):
    application = Application(patch(to("function", known="0123")), functions(), accept_drift=True)
    application.apply()
    assert application.builds == {"patched_target:function": "drift accepted"}
    application.rollback()


def test_a_missing_target_and_an_inherited_one_say_what_they_are(target):
    with pytest.raises(ApplyError, match="missing in this build"):
        Application(patch(to("function")), functions(), targets=(Target("patched_target:gone", "wrapper"),)).validate()
    with pytest.raises(ApplyError, match="inherited here; it is defined by Base.inherited"):
        inherited = (Target("patched_target:Thing.inherited", "wrapper"),)
        Application(patch(to("function")), functions(), targets=inherited).validate()


def test_a_name_bound_early_elsewhere_is_an_error_that_names_the_holder(target, tmp_path: Path):
    (tmp_path / "early_binder.py").write_text("from patched_target import function\n")
    importlib.import_module("early_binder")
    before = snapshot(target)
    with pytest.raises(ApplyError, match="early_binder.function still holds the original"):
        Application(patch(to("function")), functions()).apply()
    assert snapshot(target) == before
    holder = Target("early_binder:function", "wrapper", fingerprints={"build 1": digest("function")})
    application = Application(patch(to("function"), holder), functions())
    application.apply()
    assert sys.modules["early_binder"].function(1) == ("patched", 1)
    application.rollback()


def test_two_patches_on_one_target_need_a_declared_order(target):
    first = Application(patch(to("Thing.method")), functions())
    first.apply()
    with pytest.raises(ApplyError, match="'a-patch' owns it already"):
        Application(patch(to("Thing.method"), id="b-patch"), functions()).apply()
    second = Application(patch(to("Thing.method"), id="b-patch", after=("a-patch",)), functions())
    second.apply()
    assert target.Thing().method(1) == ("patched", ("patched", 1))
    assert second.fingerprints == first.fingerprints  # of the original, below both
    assert first.in_force() is None
    second.rollback()
    first.rollback()
    assert not getattr(vars(target.Thing)["method"], MARK, None)


def test_a_later_foreign_replacement_is_noticed(target):
    application = Application(patch(to("Thing.method")), functions())
    application.apply()
    target.Thing.method = lambda self, x: x
    assert "was replaced after the patch was applied" in application.in_force()
