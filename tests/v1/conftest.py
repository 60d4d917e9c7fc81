"""One process a release runs all checks of this folder; each test looks at one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import CACHE, ROOT, installed_public_version

RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")


def sources(release: str) -> Path:
    """Where the unpacked sources of ``release`` are, if they are there."""
    return CACHE / "src" / f"vllm-{release}"


def run(release: str, installed: str) -> dict[str, Any]:
    """All checks inside ``release``: check -> its line of the process's output; why it did not run under ``problem``."""
    command = [sys.executable, "-m", "tests.v1.release_process", release]
    if release != installed:
        if not sources(release).is_dir():
            return {"missing": f"the sources of vLLM {release} are not under {sources(release)}"}
        command.append(str(sources(release)))
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1500, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    return {line["check"]: line for line in lines} | {"stderr": done.stdout[-1500:] + done.stderr[-3000:]}


@pytest.fixture(scope="session")
def in_release(request: pytest.FixtureRequest) -> Callable[[str, str], Any]:
    """(release, "module:check") -> what the check returned. Fails with the check's own traceback.

    The releases that this session asks for run two at a time, each in a process of its own.
    """
    wanted: dict[str, None] = {}
    for item in request.session.items:
        release = getattr(getattr(item, "callspec", None), "params", {}).get("release")
        if release is not None and "in_release" in getattr(item, "fixturenames", ()):
            wanted[release] = None
    installed = installed_public_version()
    pool = ThreadPoolExecutor(max_workers=2)
    results = {release: pool.submit(run, release, installed) for release in wanted}

    def result(release: str, check: str) -> Any:
        lines = results[release].result()
        if "missing" in lines:
            pytest.skip(lines["missing"])
        line = lines.get(check)
        if line is None:
            pytest.fail(f"vLLM {release} did not reach {check}: {lines['stderr']}")
        if "failed" in line:
            pytest.fail(line["failed"])
        return line["result"]

    return result


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "release" in metafunc.fixturenames:
        releases = getattr(metafunc.module, "RELEASES", RELEASES)
        metafunc.parametrize("release", [pytest.param(r, marks=pytest.mark.releases) for r in releases])
