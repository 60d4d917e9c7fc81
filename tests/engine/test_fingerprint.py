"""Digests ignore what changes nothing, see what changes something, and are the same from source and from live code."""

from __future__ import annotations

import ast
import functools
import importlib
import random
import sys
from pathlib import Path

import pytest

from overlay import fingerprint
from tests.support import CACHE

ORIGINAL = '''
import os

class A(object):
    """Documented."""

    @staticmethod
    def f(x, y=(1, 2)):
        """Says what it does."""
        # a comment
        if x: return "a\\n\\n  b"
        return [x,
                y]

    def g(self):
        return 1

def f(x):
    return x

if os.name == "posix":
    def h(): return 1
else:
    def h(): return 2
'''


def digest(text: str, name: str) -> str:
    return fingerprint.digest_of(fingerprint.find_definition(text, name))


def test_comments_docstrings_and_layout_change_nothing():
    other = ORIGINAL.replace("# a comment", "# another\n        # comment").replace('"""Says what it does."""', "")
    other = other.replace("[x,\n                y]", "[\n            x, y\n        ]").replace('"""Documented."""', '"""No."""')
    for name in ("A", "A.f", "A.g", "f", "h"):
        assert digest(ORIGINAL, name) == digest(other, name)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ('"a\\n\\n  b"', '"a\\n  b"', "A.f"),
        ("y=(1, 2)", "y=(1, 3)", "A.f"),
        ("@staticmethod", "@classmethod", "A.f"),
        ("[x,\n", "[y,\n", "A.f"),
        ("class A(object)", "class A(dict)", "A"),
        ("def h(): return 2", "def h(): return 3", "h"),
    ],
)
def test_a_change_of_meaning_changes_the_digest(before: str, after: str, name: str):
    assert before in ORIGINAL
    assert digest(ORIGINAL, name) != digest(ORIGINAL.replace(before, after), name)


def test_one_function_does_not_pass_for_another_of_the_same_name():
    assert digest(ORIGINAL, "A.f") != digest(ORIGINAL, "f")
    with pytest.raises(fingerprint.MissingTarget):
        digest(ORIGINAL, "A.h")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fingerprinted.py").write_text(ORIGINAL)
    yield importlib.import_module("fingerprinted"), tmp_path
    sys.modules.pop("fingerprinted", None)


def test_live_code_has_the_digest_of_its_source(module):
    live, folder = module
    for name in ("A.f", "A.g", "f", "A"):
        owner, _, attribute = name.rpartition(".")
        value = vars(getattr(live, owner) if owner else live)[attribute]
        assert fingerprint.of_live(value) == fingerprint.from_source(folder, "fingerprinted", name)


def test_a_function_wrapped_at_run_time_does_not_pass_for_the_original(module):
    live, folder = module
    original = fingerprint.of_live(live.f)
    wrapped = functools.wraps(live.f)(lambda x: x + 1)
    assert wrapped.__name__ == "f"
    assert fingerprint.of_live(wrapped) != original


def test_a_decorator_in_the_source_is_part_of_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "decorated.py").write_text(
        "import functools\ndef deco(f):\n    @functools.wraps(f)\n    def inner(*a): return f(*a)\n    return inner\n"
        "@deco\ndef f(x): return x\n"
    )
    live = importlib.import_module("decorated")
    assert fingerprint.of_live(live.f) == fingerprint.from_source(tmp_path, "decorated", "f")
    assert fingerprint.of_live(live.deco(live.f)) != fingerprint.of_live(live.f)


@pytest.mark.releases
def test_the_short_cut_agrees_with_a_full_parse_on_real_sources():
    root = CACHE / "src" / "vllm-0.32.0"
    files = sorted((root / "vllm" / "v1").rglob("*.py"))
    for path in random.Random(7).sample(files, 40):
        text = path.read_text()
        for node in ast.parse(text).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            children = node.body if isinstance(node, ast.ClassDef) else []
            inner = [child for child in children if isinstance(child, ast.FunctionDef)]
            for name, definition in [(node.name, node), *((f"{node.name}.{child.name}", child) for child in inner)]:
                found = fingerprint._find_fast(text, name)
                assert found is None or fingerprint.digest_of(found) == fingerprint.digest_of(definition), (path, name)


def test_the_cache_sees_a_changed_file_and_survives_a_broken_one(tmp_path: Path):
    (tmp_path / "m.py").write_text("def f(): return 1\n")
    store = tmp_path / "cache.json"
    store.write_text("{broken")
    cache = fingerprint.SourceCache(store)
    first = cache.digest(tmp_path, "m", "f")
    cache.save()
    assert fingerprint.SourceCache(store).digest(tmp_path, "m", "f") == first
    (tmp_path / "m.py").write_text("def f(): return 22\n")
    assert fingerprint.SourceCache(store).digest(tmp_path, "m", "f") != first
