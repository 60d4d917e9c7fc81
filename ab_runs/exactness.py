"""Are the answers the same? Comparing what two arms answered, against what the base answers twice.

Verdicts on one prompt: ``identical``; ``near-tie`` at token i (in both arms the log-probabilities of the two candidates
are within the declared tolerance of each other); ``divergent``; ``untestable`` (the base itself does not repeat).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ab_runs.stats import Mean, mean_interval

IDENTICAL, NEAR_TIE, DIVERGENT, UNTESTABLE = "identical", "near-tie", "divergent", "untestable"
_WORSE = (IDENTICAL, NEAR_TIE, DIVERGENT)


@dataclass(frozen=True)
class Difference:
    """Where and how two answers to one prompt part.

    token: index of the first one that differs. gap: the larger of the two arms' log-probability gaps between the
    candidates, None where an arm does not name both. logprobs: the largest difference of log-probabilities over the
    tokens before that. way: ``logprobs`` or ``plain``, the request in which they part.
    """

    verdict: str
    token: int | None = None
    candidates: tuple[int | None, int | None] = (None, None)
    gap: float | None = None
    logprobs: float | None = None
    way: str = ""


def _part(first: Sequence[int], second: Sequence[int]) -> int | None:
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _gap(
    answer: Mapping[str, Any], index: int, chosen: int | None, other: int | None, prefix: Sequence[int]
) -> float | None:
    """How much an arm prefers its own token to the other arm's, after the same prefix; None where it cannot be said."""
    if chosen is None or other is None or list(answer["tokens"][:index]) != list(prefix):
        return None
    step = answer["top"][index] if index < len(answer["top"]) else {}
    if str(chosen) not in step or str(other) not in step:
        return None
    return abs(step[str(chosen)] - step[str(other)])


def logprob_difference(first: Mapping[str, Any], second: Mapping[str, Any], upto: int) -> float:
    """The largest difference of log-probabilities over the steps before ``upto``: of the chosen tokens, and of the
    tokens that both name. A huge number where a step shares no token (then the tokens differ as well).
    """
    worst = 0.0
    for index in range(upto):
        one, other = first["top"][index], second["top"][index]
        shared = one.keys() & other.keys()
        if not shared:
            return 1e9
        worst = max([worst, *(abs(one[token] - other[token]) for token in shared)])
    return worst


def compare(first: Mapping[str, Any], second: Mapping[str, Any], near_tie: float) -> Difference:
    """Compare two answers to one prompt (``answers.ask``), the request with log-probabilities and the plain one."""
    found: list[Difference] = []
    common = min(len(first["tokens"]), len(second["tokens"]))
    at = _part(first["tokens"], second["tokens"])
    shift = logprob_difference(first, second, common if at is None else at)
    for way, one, other in (
        ("logprobs", first["tokens"], second["tokens"]),
        ("plain", first["plain"], second["plain"]),
    ):
        index = _part(one, other)
        if index is None:
            found.append(Difference(IDENTICAL, logprobs=shift))
            continue
        mine, theirs = _at(one, index), _at(other, index)
        gaps = (_gap(first, index, mine, theirs, one[:index]), _gap(second, index, theirs, mine, one[:index]))
        gap = None if None in gaps else max(gaps)  # type: ignore[type-var]
        tie = gap is not None and gap <= near_tie
        found.append(Difference(NEAR_TIE if tie else DIVERGENT, index, (mine, theirs), gap, shift, way))
    return max(found, key=lambda item: _WORSE.index(item.verdict))


def repeats(boots: Sequence[Sequence[Mapping[str, Any]]], prompt: int) -> bool:
    """Whether every boot of the base gave the same tokens to a prompt, both ways."""
    answers = [boot[prompt] for boot in boots]
    return all(a["tokens"] == answers[0]["tokens"] and a["plain"] == answers[0]["plain"] for a in answers[1:])


def padded(tokens: int, sizes: Sequence[int]) -> int:
    """The size a step of ``tokens`` runs at: the smallest capture size that holds it, or itself where none does."""
    return min((size for size in sizes if size >= tokens), default=tokens)


@dataclass(frozen=True)
class Answers:
    """The verdict on one arm's answers. acceptable: what its patches' class of exactness promises is kept."""

    verdict: str
    acceptable: bool
    why: str
    counts: Mapping[str, int]
    prompts: tuple[Mapping[str, Any], ...]
    base_repeats_logprobs: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    base: Sequence[Sequence[Mapping[str, Any]]],
    arm: Sequence[Sequence[Mapping[str, Any]]],
    *,
    near_tie: float,
    exactness: str,
    same_size: Sequence[bool] | None = None,
) -> Answers:
    """The verdict over all prompts and all boots of ``arm`` that answered.

    base, arm: boots x prompts. exactness: the loosest class among the patches that the arm adds. same_size: by prompt,
    whether both arms ran its steps at the same padded sizes (for ``batch``; None means all).
    """
    counts = {IDENTICAL: 0, NEAR_TIE: 0, DIVERGENT: 0, UNTESTABLE: 0}
    if not base or not arm:
        return Answers(UNTESTABLE, False, "an arm gave no answers", counts, ())
    number = min(len(boot) for boot in [*base, *arm])
    if len(base) < 2:
        why = "the base answered in one boot only, so that nobody knows whether it repeats itself"
        return Answers(UNTESTABLE, False, why, {**counts, UNTESTABLE: number}, ())
    bitwise_base = all(
        logprob_difference(base[0][p], boot[p], min(len(base[0][p]["tokens"]), len(boot[p]["tokens"]))) == 0
        for boot in base[1:]
        for p in range(number)
    )
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for prompt in range(number):
        if not repeats(base, prompt):
            counts[UNTESTABLE] += 1
            rows.append({"prompt": prompt, "verdict": UNTESTABLE})
            continue
        found = [compare(base[0][prompt], boot[prompt], near_tie) for boot in arm]
        worst = max(found, key=lambda item: (_WORSE.index(item.verdict), item.logprobs or 0.0))
        counts[worst.verdict] += 1
        same = same_size is None or same_size[prompt]
        rows.append({"prompt": prompt, "same_size": same, **asdict(worst)})
        strict = exactness == "bitwise" or (exactness == "batch" and same)
        if worst.verdict == DIVERGENT:
            broken.append(f"prompt {prompt} diverges at token {worst.token}")
        elif strict and worst.verdict == NEAR_TIE:
            broken.append(f"prompt {prompt} differs at token {worst.token} (a near-tie, but {exactness} allows none)")
        elif exactness == "bitwise" and bitwise_base and worst.logprobs:
            broken.append(
                f"prompt {prompt}: log-probabilities differ by up to {worst.logprobs:.3g}, the base repeats bitwise"
            )
    tested = number - counts[UNTESTABLE]
    if not tested:
        return Answers(
            UNTESTABLE, False, "the base does not repeat itself on any prompt", counts, tuple(rows), bitwise_base
        )
    verdict = max((row["verdict"] for row in rows if row["verdict"] != UNTESTABLE), key=_WORSE.index)
    why = "; ".join(broken[:3]) or f"{tested} of {number} prompts tested, as {exactness} promises"
    return Answers(verdict, not broken, why, counts, tuple(rows), bitwise_base)


def quality_change(
    base: Sequence[Sequence[Mapping[str, Any]]], arm: Sequence[Sequence[Mapping[str, Any]]], confidence: float
) -> Mean:
    """The change of mean token log-probability (nats), arm minus base, paired by text, with its interval over texts.

    base, arm: boots x texts (``answers.quality``); boots are averaged first. Raises ValueError where texts differ.
    """

    def means(boots: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
        names = [item["context"] for item in boots[0]]
        if any([item["context"] for item in boot] != names for boot in boots):
            raise ValueError("the boots scored different texts")
        return [sum(boot[i]["mean_logprob"] for boot in boots) / len(boots) for i in range(len(names))]

    if [item["context"] for item in base[0]] != [item["context"] for item in arm[0]]:
        raise ValueError("the arms scored different texts")
    return mean_interval([b - a for a, b in zip(means(base), means(arm), strict=True)], confidence)
