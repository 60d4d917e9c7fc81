"""Digests of the V2 patches' targets, release by release."""

from __future__ import annotations

RELEASES = ("0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")


def seen(digests: str) -> dict[str, str]:
    """One digest a release, in order; ``=`` the release before's, ``-`` none (no such target there)."""
    found: dict[str, str] = {}
    last = "-"
    for release, digest in zip(RELEASES, digests.split(), strict=True):
        last = last if digest == "=" else digest
        if last != "-":
            found[f"vllm {release}"] = last
    return found
