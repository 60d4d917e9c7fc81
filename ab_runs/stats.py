"""Effects and intervals over boots.

Boots are the unit of replication: requests of one boot share its memory layout, its compiled code and its moment, so
that an interval over requests would be far too narrow. All figures are ratios, estimated on the logarithm.

The model is ``log(value) = block + arm + noise``, least squares. A block is one pass of the order (A B B A), so that
slow drift of the machine goes into the block terms, and linear drift within a block cancels because the order is
mirrored. The interval is Student's t on the residual degrees of freedom.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MOST_BOOTS = 2000  # per arm; beyond this "more boots" is no advice


@dataclass(frozen=True)
class Boot:
    """One boot's figure. block: the pass of the order it belongs to. value: > 0, any unit."""

    arm: str
    block: int
    value: float


@dataclass(frozen=True)
class Effect:
    """A relative change with its interval: ``estimate`` = arm / base - 1.

    noise: residual standard deviation of log(value) of one boot. df: residual degrees of freedom. low and high are None
    where df is 0. boots: (of the base, of the arm).
    """

    estimate: float
    low: float | None
    high: float | None
    confidence: float
    noise: float | None
    df: int
    boots: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def estimate(boots: Sequence[Boot], base: str, arm: str, confidence: float = 0.95) -> Effect:
    """The effect of ``arm`` over ``base``.

    Raises ValueError where one of the two has no boot, or a value is not a positive number, or the two never share
    a block (then the difference of arms and the difference of blocks are one).
    """
    used = [boot for boot in boots if boot.arm in (base, arm)]
    numbers = {name: sum(boot.arm == name for boot in used) for name in (base, arm)}
    for name, number in numbers.items():
        if not number:
            raise ValueError(f"arm {name!r} has no boot to compare")
    values = np.array([boot.value for boot in used], float)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("a figure to compare is not a positive number")
    names = sorted({boot.block for boot in used})
    design = np.zeros((len(used), len(names) + 1))
    for row, boot in enumerate(used):
        design[row, names.index(boot.block)] = 1.0
        design[row, -1] = float(boot.arm == arm)
    rank = int(np.linalg.matrix_rank(design))
    if rank < design.shape[1]:
        raise ValueError(f"arms {base!r} and {arm!r} share no block of the order")
    logs = np.log(values)
    solution, *_ = np.linalg.lstsq(design, logs, rcond=None)
    df = len(used) - rank
    centre = float(solution[-1])
    counts = (numbers[base], numbers[arm])
    if df == 0:
        return Effect(math.expm1(centre), None, None, confidence, None, 0, counts)
    residual = logs - design @ solution
    noise = math.sqrt(float(residual @ residual) / df)
    error = noise * math.sqrt(float(np.linalg.inv(design.T @ design)[-1, -1]))
    half = _t(confidence, df) * error
    low, high = math.expm1(centre - half), math.expm1(centre + half)
    return Effect(math.expm1(centre), low, high, confidence, noise, df, counts)


@functools.cache
def _t(confidence: float, df: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, df))


def disagreement(values: Sequence[float]) -> float | None:
    """How far the base disagrees with itself: the largest relative difference between two halves of its boots.

    values: the base's figures in running order. Three ways to halve them are tried: early against late, every other
    one, and the outer against the inner ones of each four (the order of A B B A). With four boots these are all
    the ways there are. None with fewer than two boots.
    """
    logs = np.log(np.asarray(values, float))
    number = len(logs)
    if number < 2:
        return None
    order = np.arange(number)
    halves = (order < number // 2, order % 2 == 0, np.isin(order % 4, (0, 3)))
    found = [abs(float(logs[half].mean() - logs[~half].mean())) for half in halves if 0 < half.sum() < number]
    return math.expm1(max(found))


def permutation(boots: Sequence[Boot], base: str, arm: str, limit: int = 4000, seed: int = 0) -> float:
    """Two-sided p value of the difference of mean logs under exchange of the arms' names within each block.

    It assumes nothing about the distribution and backs the t interval up; with few boots it cannot get small (one
    block A B B A: 2/6). Exact up to ``limit`` relabellings, else that many at random.
    """
    blocks: dict[int, list[Boot]] = {}
    for boot in boots:
        if boot.arm in (base, arm):
            blocks.setdefault(boot.block, []).append(boot)
    logs = [np.log([boot.value for boot in members]) for members in blocks.values()]
    taken = [sum(boot.arm == arm for boot in members) for members in blocks.values()]
    total, number = sum(float(part.sum()) for part in logs), sum(map(len, logs))
    arm_number = sum(taken)

    def difference(arm_sum: float) -> float:
        return abs(arm_sum / arm_number - (total - arm_sum) / (number - arm_number))

    observed = difference(
        sum(math.log(boot.value) for members in blocks.values() for boot in members if boot.arm == arm)
    )
    ways = math.prod(math.comb(len(part), count) for part, count in zip(logs, taken, strict=True))
    bound = observed * (1 - 1e-12) - 1e-15
    if ways <= limit:
        sums = [[sum(c) for c in itertools.combinations(part, count)] for part, count in zip(logs, taken, strict=True)]
        return sum(difference(sum(way)) >= bound for way in itertools.product(*sums)) / ways
    random = np.random.default_rng(seed)
    hits = sum(
        difference(
            sum(float(random.choice(part, count, replace=False).sum()) for part, count in zip(logs, taken, strict=True))
        )
        >= bound
        for _ in range(limit)
    )
    return (hits + 1) / (limit + 1)


def boots_to_decide(effect: Effect, margin: float) -> int | None:
    """About how many boots more per arm would decide, if the estimate and the noise stay as they are.

    Decided means that the interval leaves zero out, or lies within +-margin: whichever comes first. None where the
    noise is unknown or ``MOST_BOOTS`` would not do.
    """
    if effect.noise is None:
        return None
    centre = abs(math.log1p(effect.estimate))
    target = max(centre, math.log1p(margin) - centre)
    have = min(effect.boots)
    for number in range(have + 1, MOST_BOOTS + 1):
        df = max(1, 2 * number - max(1, number // 2) - 1)  # blocks of A B B A
        if _t(effect.confidence, df) * effect.noise * math.sqrt(2 / number) < target:
            return number - have
    return None


# The verdicts on one figure.
FASTER, SLOWER, SAME, UNDECIDED = "faster", "slower", "no difference", "undecided"


@dataclass(frozen=True)
class Decision:
    """The verdict on one figure, the sentence that says why, and the boots per arm that would decide."""

    verdict: str
    why: str
    more_boots: int | None = None


def decide(effect: Effect, control: float | None, margin: float, lower_is_better: bool = True) -> Decision:
    """Faster, slower, no difference larger than ``margin``, or undecided.

    control: ``disagreement`` of the base's boots. An arm is never called faster or slower where the base disagrees
    with itself as much as the two arms do. ``no difference`` is an equivalence: the whole interval lies within +-margin
    (at 95% this is two one-sided tests at 2.5% each), and the base agrees with itself that well. It comes first,
    because a difference that the spec calls too small to matter is none, however sure it is.
    """
    if effect.low is None or effect.high is None or control is None:
        return Decision(UNDECIDED, "too few boots for an interval or for A against A")
    size = abs(effect.estimate)
    more = boots_to_decide(effect, margin)
    if -margin < effect.low and effect.high < margin:
        if control <= margin:
            return Decision(SAME, f"the interval lies within ±{margin:.2%}")
        return Decision(UNDECIDED, f"A against A differs by {control:.2%}, more than the margin of {margin:.2%}", more)
    if effect.low <= 0 <= effect.high:
        return Decision(UNDECIDED, "the interval holds zero and reaches beyond the margin", more)
    if control >= size:
        return Decision(UNDECIDED, f"A against A differs by {control:.2%}, as much as A and B ({size:.2%})", more)
    better = (effect.estimate < 0) == lower_is_better
    return Decision(FASTER if better else SLOWER, f"the interval leaves zero out, A against A differs by {control:.2%}")


@dataclass(frozen=True)
class Mean:
    """A mean with its t interval over ``number`` independent items."""

    mean: float
    low: float | None
    high: float | None
    number: int


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Mean:
    """Mean of ``values`` with Student's interval; no interval below two values."""
    data = np.asarray(values, float)
    mean = float(data.mean())
    if len(data) < 2:
        return Mean(mean, None, None, len(data))
    half = _t(confidence, len(data) - 1) * float(data.std(ddof=1)) / math.sqrt(len(data))
    return Mean(mean, mean - half, mean + half, len(data))
