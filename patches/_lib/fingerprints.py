"""Digests of the targets in patches' specifications, release by release."""

from __future__ import annotations

RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")


def by_release(digests: str, releases: tuple[str, ...] = RELEASES) -> dict[str, str]:
    """One digest a release, in order; ``=`` the release before's, ``-`` none (no such target there).

    Raises ValueError where there is another number of digests than of releases.
    """
    found: dict[str, str] = {}
    last = "-"
    for release, digest in zip(releases, digests.split(), strict=True):
        last = last if digest == "=" else digest
        if last != "-":
            found[f"vllm {release}"] = last
    return found
