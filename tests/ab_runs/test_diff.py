"""What two patch sets differ in."""

import json
from pathlib import Path

import pytest

from ab_runs import cli, diff, plans
from ab_runs.spec import SpecError


def write(path, text):
    path.write_text(text)
    return path


def test_settings_are_compared_key_by_key():
    found = diff.settings(
        {"exactness": "batch", "patches": {"a": True, "b": {"n": 1}}},
        {"exactness": "rounding", "patches": {"a": {"n": 2}, "b": {"n": 1}, "c": False}},
    )
    assert found == [
        ("exactness", "batch", "rounding"),
        ("patches.a.n", "(not set)", 2),
        ("patches.c.on", "(not set)", False),
    ]


def test_equal_files_have_no_difference(tmp_path, capsys):
    one = write(tmp_path / "a.yaml", "patches: {a: true}")
    assert cli.main(["diff", str(one), str(one)]) == 0
    assert "the same settings" in capsys.readouterr().out


def test_files_that_cannot_be_read_are_said(tmp_path):
    for path, message in (
        (tmp_path / "none.yaml", "cannot be read"),
        (write(tmp_path / "list.yaml", "- 1"), "expected a mapping"),
        (write(tmp_path / "cut.yaml", "{a"), "is no YAML"),
    ):
        with pytest.raises(SpecError, match=message):
            diff.read(path)
    assert diff.read(write(tmp_path / "empty.yaml", "")) == {}


def test_for_a_model_the_plans_are_compared_too(tmp_path, monkeypatch, capsys):
    plan = {"facts": {}, "argv": ["m"], "env": {}, "digest": "d"}

    def make(spec):
        patches = {
            "first": [{"id": "a", "verdict": "apply", "reason": "ok"}],
            "second": [{"id": "a", "verdict": "refused", "reason": "drift"}],
        }
        return {name: plans.Plan(name, {**plan, "patches": rows}) for name, rows in patches.items()}

    monkeypatch.setattr(plans, "make", make)
    one, other = write(tmp_path / "a.yaml", "patches: {a: true}"), write(tmp_path / "b.yaml", "accept_drift: [a]")
    assert cli.main(["diff", str(one), str(other), "--model", "m", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"]["patches"] == {"a": ["apply: ok", "refused: drift"]}
    assert isinstance(Path(one), Path)
