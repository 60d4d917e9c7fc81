"""What the V1 patches' specifications share: digests by release, and which builds have a V1 runner of their own."""

from __future__ import annotations

from typing import Any

from patches._lib.fingerprints import RELEASES, by_release


def seen(digests: str) -> dict[str, str]:
    """See ``by_release``. Fewer digests than releases: the patch ends with the release before."""
    return by_release(digests, RELEASES[: len(digests.split())])


def own_runner(facts: Any) -> str | None:
    """A platform plugin with a V1 runner of its own: what these patches read off vLLM's does not hold there."""
    for name in facts.build.plugins:
        if name.lower().replace("-", "_") in {"vllm_hcu", "vllm_ascend"}:
            return f"{name} brings its own V1 runner"
    return None
