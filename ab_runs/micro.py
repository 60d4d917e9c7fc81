"""The micro layer: a patch's functions, original against patched, A B A, on the real modules with realistic inputs.

A fast function is an upper bound and no service: 106 matrix shapes that won alone gave 0.02% in service. So every figure
comes with the bound that it sets for a given step time (Amdahl).

**Protocol.** A patch's cases are in ``ab_runs/micro_cases/<id with underscores>.py`` (for a user's patch: in the
patch's own module) as

    def cases(device: str) -> Iterable[Case]: ...

A case is written once and knows nothing of patched or not. ``build()`` makes fresh objects of the build's own classes,
seeded, and returns a ``Work``: ``step()`` is what is timed, ``outputs()`` gives what it wrote or returned. The runner
builds and times it with the patch taken back (A), applied through its real specification (B), and taken back again (A).
Equality is checked before anything is timed, step by step on two fresh builds: integers and booleans must be equal;
floats must be equal bit by bit for ``bitwise`` and ``batch`` patches and close for ``rounding``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ab_runs.spec import SpecError

CHECKED_STEPS = 200
# Largest relative and absolute error of a ``rounding`` patch's floats.
RTOL, ATOL = 2e-2, 1e-3


@dataclass(frozen=True)
class Work:
    """One build of a case. step: what is timed. outputs: name -> tensor, array or number, read after a step.
    prepare: called before each step, untimed (the part of a step that both share).
    """

    step: Callable[[], Any]
    outputs: Callable[[], Mapping[str, Any]]
    prepare: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Case:
    """One realistic use. name: says the shape. per_step: how often a step of the service does this."""

    name: str
    build: Callable[[], Work]
    per_step: float = 1.0


@dataclass(frozen=True)
class Result:
    """Times in microseconds of one call: A1, B, A2 as medians. drift: A2 / A1 - 1. speedup: mean of the As / B.

    saved: microseconds of a step of the service. bound: the largest speed-up of a service whose step takes ``step_ms``,
    ``1 / (1 - f + f / s)`` with f the function's share of the step and s its speed-up.
    """

    case: str
    a1: float
    b: float
    a2: float
    drift: float
    speedup: float
    saved: float
    bound: float | None
    hits: int
    refusals: Mapping[str, int]


def amdahl(share: float, speedup: float) -> float:
    """Speed-up of the whole where a part of ``share`` (0..1) gets ``speedup`` times faster."""
    return 1 / (1 - share + share / speedup)


def differs(first: Any, second: Any, exact: bool) -> str | None:
    """None where two outputs are equal as the patch's class of exactness asks, else how they differ."""
    import numpy as np

    one, other = _array(first), _array(second)
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype}{list(one.shape)} against {other.dtype}{list(other.shape)}"
    if one.dtype.kind in "iub" or exact:
        if one.dtype.kind == "f":  # bit by bit: NaN equals NaN, 0 differs from -0
            width = {2: np.uint16, 4: np.uint32, 8: np.uint64}[one.dtype.itemsize]
            one, other = np.ascontiguousarray(one).view(width), np.ascontiguousarray(other).view(width)
        wrong = np.argwhere(np.atleast_1d(one != other))
        return None if not len(wrong) else f"{len(wrong)} of {one.size} values differ, the first at {wrong[0].tolist()}"
    if not np.allclose(one, other, rtol=RTOL, atol=ATOL, equal_nan=True):
        return f"largest difference {float(np.nanmax(np.abs(one - other))):.3g}"
    return None


def _array(value: Any) -> Any:
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()  # exact: every bfloat16 is a float32
        value = value.numpy()
    return np.asarray(value)


def check(case: Case, applied: Callable[[], contextlib.AbstractContextManager[Any]], exact: bool) -> None:
    """Run a case without and with the patch and compare all outputs of every step. Raises SpecError at the first
    difference.
    """
    seen: list[list[Mapping[str, Any]]] = []
    for patched in (False, True):
        with applied() if patched else contextlib.nullcontext():
            work = case.build()
            rows = []
            for _ in range(CHECKED_STEPS):
                if work.prepare:
                    work.prepare()
                work.step()
                rows.append({name: _array(value).copy() for name, value in work.outputs().items()})
            seen.append(rows)
    for step, (one, other) in enumerate(zip(*seen, strict=True)):
        for name in one.keys() | other.keys():
            said = differs(one[name], other[name], exact) if name in one and name in other else "only one has it"
            if said:
                raise SpecError(f"{case.name}: step {step}: {name}: the patch changes it: {said}")


def measure(work: Work, seconds: float, synchronize: Callable[[], None]) -> float:
    """Median microseconds of one ``step`` over about ``seconds``, after a short warm-up."""
    for _ in range(20):
        if work.prepare:
            work.prepare()
        work.step()
    synchronize()
    times: list[int] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 30:
        if work.prepare:
            work.prepare()
            synchronize()
        began = time.perf_counter_ns()
        work.step()
        synchronize()
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1000


def compare(
    case: Case,
    applied: Callable[[], contextlib.AbstractContextManager[Any]],
    seconds: float,
    step_ms: float | None,
    synchronize: Callable[[], None] = lambda: None,
    counted: Callable[[], Mapping[str, int]] = dict,
) -> Result:
    """A B A of one case, in one process."""
    a1 = measure(case.build(), seconds, synchronize)
    before = dict(counted())
    with applied():
        b = measure(case.build(), seconds, synchronize)
    after = dict(counted())
    a2 = measure(case.build(), seconds, synchronize)
    base = (a1 + a2) / 2
    rise = {event: count - before.get(event, 0) for event, count in after.items() if count > before.get(event, 0)}
    bound = None
    if step_ms:
        bound = amdahl(min(1.0, base * case.per_step / (step_ms * 1000)), base / b)
    return Result(
        case.name,
        a1,
        b,
        a2,
        a2 / a1 - 1,
        base / b,
        (base - b) * case.per_step,
        bound,
        rise.pop("hit", 0),
        rise,
    )


def find_cases(patch: str, module: Any) -> Callable[[str], Iterable[Case]]:
    """The provider of a patch's cases. Raises SpecError where there is none."""
    name = f"ab_runs.micro_cases.{patch.replace('-', '_')}"
    provider = getattr(module, "cases", None)
    if importlib.util.find_spec(name) is not None:
        provider = importlib.import_module(name).cases
    if provider is None:
        raise SpecError(f"{patch}: has no micro cases: write {name.replace('.', '/')}.py (see ab_runs/micro.py)")
    return provider


@contextlib.contextmanager
def applying(entry: Any, version: str) -> Iterator[None]:
    """The patch in force in this process, through its real specification, and taken back. Raises SpecError."""
    from overlay.apply import Application, ApplyError
    from overlay.versions import in_range

    patch = entry.patch

    def present(targets: Sequence[Any]) -> tuple[Any, ...]:
        kept = tuple(t for t in targets if not t.versions or in_range(version, t.versions))
        for target in kept:
            importlib.import_module(target.module)
        return kept

    application = Application(patch, sys.modules[entry.module], present(patch.targets), present(patch.assumes))
    try:
        application.apply()
    except ApplyError as error:
        raise SpecError(f"{patch.id}: cannot be put into force here: {error}") from error
    try:
        yield
    finally:
        application.rollback()


def table(results: Sequence[Result], step_ms: float | None) -> str:
    heads = ["case", "A1 µs", "B µs", "A2 µs", "drift", "speed-up", "saves µs/step", "hits", "refusals"]
    heads += [f"bound at {step_ms:g} ms"] if step_ms else []
    rows = [heads]
    for r in results:
        row = [r.case, f"{r.a1:.2f}", f"{r.b:.2f}", f"{r.a2:.2f}", f"{r.drift:+.1%}", f"{r.speedup:.2f}x"]
        row += [f"{r.saved:.1f}", str(r.hits), str(sum(r.refusals.values()))]
        row += [f"{r.bound:.4f}x"] if r.bound is not None else []
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def command(
    patch: str, device: str, step_ms: float | None, seconds: float, folders: Sequence[Path], as_json: bool
) -> int:
    """``python -m ab_runs micro PATCH``. Raises SpecError."""
    from overlay.catalog import CatalogError, load_catalog
    from overlay.runtime import Counters

    try:
        catalog = load_catalog(folders)
    except CatalogError as error:
        raise SpecError(str(error)) from error
    if patch not in catalog:
        raise SpecError(f"{patch!r} is no patch; there are {', '.join(sorted(catalog))}")
    entry = catalog[patch]
    if entry.patch.kind.value == "config":
        raise SpecError(f"{patch}: a config patch has no functions to time; compare it with `run`")
    provider = find_cases(patch, sys.modules[entry.module])
    import torch
    import vllm

    version = vllm.__version__.partition("+")[0]
    synchronize = torch.accelerator.synchronize if device != "cpu" else (lambda: None)
    exact = entry.patch.exactness.value != "rounding"

    counters = Counters(patch)
    results = []
    for case in provider(device):
        check(case, lambda: applying(entry, version), exact)
        results.append(compare(case, lambda: applying(entry, version), seconds, step_ms, synchronize, counters.all))
    if as_json:
        print(json.dumps({"patch": patch, "vllm": version, "device": device, "results": [asdict(r) for r in results]}))
    else:
        print(f"{patch} on vLLM {version}, {device}; outputs equal over {CHECKED_STEPS} steps of every case")
        print(table(results, step_ms))
    return 0
