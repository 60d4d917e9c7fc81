"""Variables that hide devices from a process: ``CUDA_VISIBLE_DEVICES`` and its kin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def chosen(
    environ: Mapping[str, str], names: Sequence[str], ids: Sequence[Sequence[str]]
) -> tuple[list[int], str | None]:
    """Which of the devices a process may see, in its order, and the variable that says so (None: none is set).

    names: variables, the strongest first. ids: for each device the spellings that mean it (index, UUID); a UUID may be
    shortened. As CUDA and HIP have it, an entry that names no device hides itself and all behind it.
    """
    for name in names:
        if name in environ:
            return _pick(environ[name], ids), name
    return list(range(len(ids))), None


def _pick(value: str, ids: Sequence[Sequence[str]]) -> list[int]:
    picked: list[int] = []
    for entry in value.split(","):
        at = _find(entry.strip(), ids)
        if at is None or at in picked:
            break
        picked.append(at)
    return picked


def _find(entry: str, ids: Sequence[Sequence[str]]) -> int | None:
    if not entry:
        return None
    for at, spellings in enumerate(ids):
        for spelling in spellings:
            if entry == spelling or (not entry.isdigit() and len(entry) > 4 and spelling.startswith(entry)):
                return at
    return None


def ranges(value: str) -> list[int]:
    """``"0-2,5"`` as [0, 1, 2, 5] (Ascend). Raises ValueError for what is neither numbers nor ranges."""
    numbers: list[int] = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        first, dash, last = part.partition("-")
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers
