"""Digests of the V2 patches' targets: the runner is there from 0.23.0 on."""

from __future__ import annotations

from patches._lib.fingerprints import RELEASES, by_release


def seen(digests: str) -> dict[str, str]:
    """See ``by_release``; without a digest for 0.18.1."""
    return by_release(digests, RELEASES[1:])
