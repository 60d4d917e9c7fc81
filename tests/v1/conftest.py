"""One process a release runs all checks of this folder; each test looks at one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import CACHE, ROOT, installed_public_version

RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")


def sources(release: str) -> Path:
    """Where the unpacked sources of ``release`` are, if they are there."""
    return CACHE / "src" / f"vllm-{release}"


@pytest.fixture(scope="session")
def in_release() -> Callable[[str, str], Any]:
    """(release, "module:check") -> what the check returned. Fails with the check's own traceback."""
    results: dict[str, dict[str, Any]] = {}
    installed = installed_public_version()

    def run(release: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.v1.release_process", release]
        if release != installed:
            if not sources(release).is_dir():
                pytest.skip(f"the sources of vLLM {release} are not under {sources(release)}")
            command.append(str(sources(release)))
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
        if not lines:
            pytest.fail(f"no check ran in vLLM {release}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return {line["check"]: line for line in lines} | {"stderr": done.stderr[-2000:]}

    def result(release: str, check: str) -> Any:
        if release not in results:
            results[release] = run(release)
        line = results[release].get(check)
        if line is None:
            pytest.fail(f"vLLM {release} did not reach {check}: {results[release]['stderr']}")
        if "failed" in line:
            pytest.fail(line["failed"])
        return line["result"]

    return result


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "release" in metafunc.fixturenames:
        releases = getattr(metafunc.module, "RELEASES", RELEASES)
        metafunc.parametrize("release", [pytest.param(r, marks=pytest.mark.releases) for r in releases])
