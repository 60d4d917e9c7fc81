"""What a vLLM version string says, and whether it lies in a range.

Vendors write versions of their own: ``0.11.0+das.opt1.rc2.dtk2604.20260128.g0bf89b0c``, ``0.18.0+empty``,
``0.1.dev2922+gbb3f938cb``, ``dev``. Ranges match on the public part alone; what stands behind ``+`` are tags. The
rules are PEP 440's (https://peps.python.org/pep-0440/), kept small here because the launcher has no time for an import
that does more. A string that is none, and a source build without a release (``0.1.devN``), is unknown: never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_VERSION = re.compile(
    r"""\s*v?(?:(?P<epoch>\d+)!)?(?P<release>\d+(?:\.\d+)*)
    (?:[-_.]?(?P<pre>alpha|a|beta|b|preview|pre|c|rc)[-_.]?(?P<pre_n>\d*))?
    (?:-(?P<post_bare>\d+)|[-_.]?(?P<post>post|rev|r)[-_.]?(?P<post_n>\d*))?
    (?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_n>\d*))?
    (?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?\s*""",
    re.VERBOSE | re.IGNORECASE,
)
_PRE = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([^\s,]+?)(\.\*)?\s*")
_INFINITY = float("inf")


@dataclass(frozen=True)
class Version:
    """One parsed version string.

    raw: as given. public: normalised public part (``0.11.2.dev673``), or None with the reason in ``unknown``.
    local: what stood behind ``+``, lower case, parts joined by dots. tags: those parts.
    """

    raw: str
    public: str | None
    local: str = ""
    unknown: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self.local.split(".")) if self.local else ()

    @property
    def vendor(self) -> str:
        """Who built it, as far as the tags tell: ``hygon``, ``rocm``, ``cpu``, ``cuda``, or ""."""
        for tag in self.tags:
            if tag == "das" or tag.startswith(("dtk", "hcu")):
                return "hygon"
        for tag in self.tags:
            for vendor, pattern in (("rocm", "rocm"), ("cuda", "cu1"), ("cpu", "cpu"), ("musa", "musa"), ("maca", "maca")):
                if tag.startswith(pattern):
                    return vendor
        return ""


def parse(raw: str) -> Version:
    """``raw`` taken apart. Never raises: what is no version has ``public`` None and says why."""
    text = str(raw)
    found = _VERSION.fullmatch(text)
    if found is None:
        local = text.partition("+")[2].strip().lower()
        local = ".".join(re.split(r"[-_.]", local)) if re.fullmatch(r"[a-z0-9]+(?:[-_.][a-z0-9]+)*", local) else ""
        return Version(text, None, local, f"{text!r} is not a version (PEP 440)")
    public, release = _public(found)
    local = ".".join(re.split(r"[-_.]", found["local"].lower())) if found["local"] else ""
    if found["dev"] and release in ((0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0)):
        reason = f"{text!r} is what a source build without release tags calls itself: it names no release"
        return Version(text, None, local, reason)
    return Version(text, public, local)


def _public(found: re.Match[str]) -> tuple[str, tuple[int, ...]]:
    release = tuple(int(part) for part in found["release"].split("."))
    public = f"{int(found['epoch'])}!" if found["epoch"] and int(found["epoch"]) else ""
    public += ".".join(map(str, release))
    if found["pre"]:
        name = found["pre"].lower()
        public += f"{_PRE.get(name, name)}{int(found['pre_n'] or 0)}"
    if found["post_bare"]:
        public += f".post{int(found['post_bare'])}"
    elif found["post"]:
        public += f".post{int(found['post_n'] or 0)}"
    if found["dev"]:
        public += f".dev{int(found['dev_n'] or 0)}"
    return public, release


@lru_cache(maxsize=512)
def key(public: str) -> tuple[Any, ...]:
    """Sort key of a version's public part. Raises ValueError for what is none.

    Order within one release: dev, pre-releases, the release, post releases; a dev of any of them just before it.
    """
    found = _VERSION.fullmatch(public)
    if found is None:
        raise ValueError(f"not a version: {public!r}")
    release = [int(part) for part in found["release"].split(".")]
    while release and release[-1] == 0:
        release.pop()
    has_post = bool(found["post_bare"] or found["post"])
    if found["pre"]:
        name = found["pre"].lower()
        pre: tuple[Any, ...] = (0, _PRE.get(name, name), int(found["pre_n"] or 0))
    elif found["dev"] and not has_post:
        pre = (-1, "", 0)
    else:
        pre = (1, "", 0)
    post = int(found["post_bare"] or found["post_n"] or 0) if has_post else -1
    dev = int(found["dev_n"] or 0) if found["dev"] else _INFINITY
    return int(found["epoch"] or 0), tuple(release), pre, post, dev


def _is_pre(public: str) -> bool:
    _, _, pre, _, dev = key(public)
    return pre[0] != 1 or dev != _INFINITY


def in_range(public: str | None, spec: str) -> bool | None:
    """Whether ``public`` lies in ``spec`` (``">=0.18.1,<0.34"``). None where the version is unknown.

    An empty ``spec`` holds for every version, the unknown one included. ``<0.19`` does not admit pre-releases and dev
    builds of 0.19, ``>=0.19`` does not either: such a build is neither release. Raises ValueError for a spec that is none.
    """
    clauses = parse_range(spec)
    if not clauses:
        return True
    if public is None:
        return None
    return all(_holds(public, *clause) for clause in clauses)


@lru_cache(maxsize=512)
def parse_range(spec: str) -> tuple[tuple[str, str, bool], ...]:
    """``spec`` as (operator, version, ends in ``.*``) triples. Raises ValueError with the clause at fault."""
    clauses = []
    for part in spec.split(",") if spec.strip() else ():
        found = _CLAUSE.fullmatch(part)
        if found is None or _VERSION.fullmatch(found[2]) is None or "+" in found[2]:
            raise ValueError(f"version range {spec!r}: cannot read {part.strip()!r}; expected e.g. '>=0.18.1,<0.34'")
        if found[3] and found[1] not in ("==", "!="):
            raise ValueError(f"version range {spec!r}: '.*' only goes with == and !=, not in {part.strip()!r}")
        clauses.append((found[1], found[2], bool(found[3])))
    return tuple(clauses)


def _holds(public: str, operator: str, bound: str, prefix: bool) -> bool:
    mine, theirs = key(public), key(bound)
    if prefix:
        same = _has_prefix(public, bound)
        return same if operator == "==" else not same
    if operator == "==":
        return mine == theirs
    if operator == "!=":
        return mine != theirs
    if operator == ">=":
        return mine >= theirs
    if operator == "<=":
        return mine <= theirs
    if operator == "<":
        pre_of_bound = _is_pre(public) and not _is_pre(bound) and mine[:2] == theirs[:2] and mine[3] == theirs[3]
        return mine < theirs and not pre_of_bound
    post_of_bound = mine[3] >= 0 and theirs[3] < 0 and mine[:3] == theirs[:3] and theirs[4] == _INFINITY
    return mine > theirs and not post_of_bound


def _has_prefix(public: str, bound: str) -> bool:
    epoch, wanted = _VERSION.fullmatch(bound)["epoch"], _VERSION.fullmatch(bound)["release"].split(".")  # type: ignore[index]
    found = _VERSION.fullmatch(public)
    release = [int(part) for part in found["release"].split(".")]  # type: ignore[index]
    release += [0] * (len(wanted) - len(release))
    same_epoch = int(epoch or 0) == int(found["epoch"] or 0)  # type: ignore[index]
    return same_epoch and release[: len(wanted)] == [int(part) for part in wanted]
