"""The V2 patches on the real V2 runner: the cases run in a process of their own (see ``tests.testbeds.v2_on_cpu``).

Whether Triton's kernels are interpreted is decided when they are defined, for a whole process; the other tests need them
not to be. One process runs all cases; each shows here under its own name.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support import ROOT

CASES = Path(__file__).parent / "cases"
NAMES = [
    f"{file.stem}::{node.name}"
    for file in sorted(CASES.glob("case_*.py"))
    for node in ast.parse(file.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """case -> (parameters, "" or why it failed) of each run of it."""
    pytest.importorskip("vllm")
    report = tmp_path_factory.mktemp("v2") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "--show-capture=no", "-p", "no:cacheprovider"]
    command += ["-p", "tests.v2.cases.engine", "-o", "python_files=case_*.py", f"--junitxml={report}", str(CASES)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert report.is_file(), f"the cases did not run:\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
    found: dict[str, list[tuple[str, str]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        stem = case.get("classname", "").rpartition(".")[2]
        name, _, parameters = case.get("name", "").partition("[")
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        reason = "".join(child.text or child.get("message", "") for child in bad)
        found.setdefault(f"{stem}::{name}", []).append((parameters.rstrip("]"), reason if bad else ""))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, results: dict[str, list[tuple[str, str]]]) -> None:
    assert name in results, "the case did not run"
    failed = [f"[{parameters}]\n{reason}" for parameters, reason in results[name] if reason]
    assert not failed, "\n".join(failed)
