"""Single definitions of other vLLM releases, executed from their unpacked sources without importing those releases."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.support import CACHE

RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")


def define(release: str, file: str, wanted: list[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute the definitions ``wanted`` (``name`` or ``Class.method``) of ``file`` in ``namespace``, and return it.

    Annotations are not evaluated. Skips the test where the release's sources are not there.
    """
    path = CACHE / "src" / f"vllm-{release}" / "vllm" / file
    if not path.is_file():
        pytest.skip(f"the sources of vLLM {release} are not unpacked under {CACHE / 'src'}")
    tree = ast.parse(path.read_text())
    for name in wanted:
        owner, _, method = name.rpartition(".")
        scope = tree.body
        if owner:
            scope = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner).body
        node = next(n for n in scope if getattr(n, "name", None) == method)
        future = ast.ImportFrom(module="__future__", names=[ast.alias(name="annotations")], level=0)
        module = ast.fix_missing_locations(ast.Module([future, node], []))
        exec(compile(module, str(path), "exec"), namespace)  # noqa: S102
    return namespace
