"""The V1 patches' specifications: where they stay out, and that their digests are those of the real sources."""

import pytest

from overlay.catalog import load_catalog
from overlay.facts import Build, Facts
from overlay.fingerprint import from_source
from patches._lib.v1_fingerprints import RELEASES, own_runner, seen
from tests.v1.conftest import sources

V1 = (
    "block-table-dirty",
    "min-tokens-mask-cache",
    "decode-input-prep",
    "unchanged-copies",
    "mrope-pinned-copy",
    "greedy-native-dtype",
    "gdn-metadata-once",
)


def test_a_plugin_with_its_own_runner_keeps_them_out():
    assert own_runner(Facts(build=Build(plugins={"vllm_hcu": "0.21.0+das.abc.dtk2604"})))
    assert own_runner(Facts(build=Build(plugins={"vllm-ascend": "0.23.0"})))
    assert own_runner(Facts(build=Build(plugins={"some-metrics-plugin": "1.0"}))) is None


def test_digests_by_release():
    assert seen("- a = b") == {"vllm 0.23.0": "a", "vllm 0.26.0": "a", "vllm 0.28.0": "b"}


@pytest.mark.releases
@pytest.mark.parametrize("name", V1)
def test_every_digest_is_that_of_the_real_source(name):
    patch = load_catalog()[name].patch
    checked = 0
    for target in (*patch.targets, *patch.assumes):
        assert target.fingerprints, target.at
        for build, digest in target.fingerprints.items():
            root = sources(build.removeprefix("vllm "))
            if root.is_dir():
                assert from_source(root, target.module, target.qualname) == digest, (target.at, build)
                checked += 1
    if not checked:
        pytest.skip("no sources of other releases here")
    assert {build for target in patch.targets for build in target.fingerprints} <= {f"vllm {r}" for r in RELEASES}
