"""The overlay's own places in vLLM exist in every supported release, and the plan's digest is in vLLM's compile-cache key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlay.bootstrap.arm import pack
from overlay.vllm_hooks import POINTS, missing_points
from tests.support import CACHE, ROOT

RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_every_point_exists_in_the_release(release: str):
    assert missing_points(str(CACHE / "src" / f"vllm-{release}")) == []


@pytest.mark.releases
def test_a_missing_point_is_named(tmp_path: Path):
    root = CACHE / "src" / "vllm-0.32.0"
    for point in POINTS:
        module = point.partition(":")[0]
        file = tmp_path / (module.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((root / (module.replace(".", "/") + ".py")).read_text())
    assert missing_points(str(tmp_path)) == []
    worker = tmp_path / "vllm/v1/worker/worker_base.py"
    worker.write_text(worker.read_text().replace("def init_worker(", "def begin_worker("))
    assert missing_points(str(tmp_path)) == ["vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker"]


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_catalogue_targets_are_found_or_not_wanted_in_the_release(release: str):
    """Every target that a patch wants in a release exists there, with a digest on record for that release's source."""
    from overlay.catalog import load_catalog
    from overlay.facts import Build, Facts
    from overlay.fingerprint import from_source
    from overlay.spec import Kind
    from overlay.versions import in_range

    root = CACHE / "src" / f"vllm-{release}"
    checked = 0
    for name, entry in load_catalog().items():
        patch = entry.patch
        if patch.kind is Kind.CONFIG or in_range(release, patch.condition.vllm) is False:
            continue
        module = sys.modules[entry.module]
        facts = Facts(build=Build("vllm", release, release, root=str(root / "vllm")))
        if patch.superseded and getattr(module, patch.superseded)(facts):
            continue  # the release does it already
        wanted = [t for t in (*patch.targets, *patch.assumes) if not t.versions or in_range(release, t.versions)]
        for target in wanted:
            if target.module.partition(".")[0] != "vllm" or patch.condition.plugins:
                continue
            digest = from_source(root, target.module, target.qualname)
            assert digest in target.fingerprints.values(), f"{name}: {target.at} in {release}: {digest} is not on record"
            checked += 1
    assert checked > 10


KEY = "import vllm.envs as envs; print(sorted(str(item) for item in envs.compile_factors().items() if 'OVERLAY' in str(item)))"


def test_the_digest_is_part_of_vllms_compile_cache_key():
    def key(digest: str) -> str:
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "overlay/bootstrap"), "VLLM_LOGGING_LEVEL": "ERROR"}
        environ["OVERLAY_PLAN"] = pack({"digest": digest, "patches": [], "runner": "V1"}, POINTS)
        done = subprocess.run([sys.executable, "-c", KEY], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()[-1]

    assert "first" in key("first") and key("first") != key("second")
