"""What the V1 patches' specifications share: digests by release, and which builds have a V1 runner of their own."""

from __future__ import annotations

from typing import Any

RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")


def seen(digests: str) -> dict[str, str]:
    """One digest a release, in order; ``=`` the release before's, ``-`` none (no such target there).

    Fewer digests than releases: the patch ends with the release before.
    """
    found: dict[str, str] = {}
    last = "-"
    for release, digest in zip(RELEASES, digests.split(), strict=False):
        last = last if digest == "=" else digest
        if last != "-":
            found[f"vllm {release}"] = last
    return found


def own_runner(facts: Any) -> str | None:
    """A platform plugin with a V1 runner of its own: what these patches read off vLLM's does not hold there."""
    for name in facts.build.plugins:
        if name.lower().replace("-", "_") in {"vllm_hcu", "vllm_ascend"}:
            return f"{name} brings its own V1 runner"
    return None
