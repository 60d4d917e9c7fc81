"""CUDA graph capture sizes that cover every speculative decode step of one replica.

A decode step of n requests with K draft tokens each runs n x (1 + K) tokens, and a full decode graph serves it only
at a captured multiple of 1 + K. vLLM rounds each capture size up to such a multiple and drops what then passes the
largest size. Its default list stops at 512 tokens (1024 on data-centre Blackwell since 0.28): with K = 4 that is 102
requests. Sizes count tokens, not requests.

The list contributed is the build's own default list, so that nothing it covers is lost, plus the missing multiples.
A list that the user gave stays as it is: the plan then names the step sizes that it leaves without a graph, and the
list that would cover them.

Source of the rules restated here: ``VllmConfig._set_cudagraph_sizes``, ``CompilationConfig.
adjust_cudagraph_sizes_for_spec_decode`` (V1 runner; both runners in 0.23) and ``CudaGraphManager._init_candidates`` (V2
runner), read in 0.18.1, 0.23.0, 0.26.0, 0.28.0, 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from overlay.spec import Condition, Contribution, Exactness, Kind, Option, Patch, at_least

if TYPE_CHECKING:
    from overlay.facts import Facts

PATCH = Patch(
    id="spec-capture-sizes",
    kind=Kind.CONFIG,
    summary="CUDA graph sizes for every n x (1 + K) tokens that one replica serves under speculation",
    why=(
        "vLLM rounds capture sizes up to multiples of 1 + K and drops those beyond the largest: [1,2,4,5,8] with K = 4 "
        "leaves [5], so that steps of 10, 20 and 40 tokens run without a graph (42 ms a step in place of 11, reported "
        "for Ascend 910C). Its own default list ends at 512 tokens and pads 3 requests of 5 tokens to 4 requests."
    ),
    remove_when="vLLM sizes decode graphs by requests and up to max_num_seqs",
    exactness=Exactness.BATCH,
    condition=Condition(
        vllm=">=0.18.1,<0.34",
        platforms=("cuda", "rocm", "dcu", "ascend"),
        facts={"serving.num_speculative_tokens": at_least(1)},
    ),
    config="contribute",
    options={
        "max_requests": Option(0, "cover steps of up to this many requests a replica; 0: all of max_num_seqs"),
        "exact_requests": Option(64, "a size of its own for each number of requests up to this; then steps of 8, 16"),
        "max_tokens": Option(2048, "no size above this many tokens: each graph costs memory and start-up time"),
    },
    tests="tests/config_patches/test_spec_capture_sizes.py",
)


def contribute(facts: Facts, options: Mapping[str, Any]) -> Contribution:
    """The capture sizes to add for ``facts``.

    ``serving.max_num_seqs`` is per data-parallel replica, as in vLLM: each engine has a scheduler of its own.
    """
    serving = facts.serving
    if serving.enforce_eager or (serving.cudagraph_mode or "").upper() == "NONE":
        return Contribution(nothing="no CUDA graphs are captured (eager mode or cudagraph_mode NONE)")
    if serving.max_num_seqs is None:
        return Contribution(nothing=f"max_num_seqs is unknown: {facts.why_unknown('serving.max_num_seqs')}")
    query = 1 + (serving.num_speculative_tokens or 0)
    if facts.hardware.platform == "ascend":
        # Every graph there takes streams from a small pool, and capture fails when it is empty (vllm-ascend#7907).
        options = {**options, "exact_requests": min(options.get("exact_requests") or 0, 16)}
    wanted = wanted_sizes(query, serving.max_num_seqs, serving.max_num_batched_tokens, options)
    if not wanted:
        return Contribution(nothing=f"not even one request of {query} tokens fits under the limits")
    runner, mode = serving.runner or "V1", serving.cudagraph_mode or ""
    given = serving.cudagraph_capture_sizes
    ceiling = serving.max_cudagraph_capture_size
    notes = _limits(query, serving.max_num_seqs, wanted, options)

    if given is not None:
        kept = kept_sizes(given, query, serving, runner)
        missing = [size for size in wanted if size not in kept]
        if not missing:
            return Contribution(superseded="the capture sizes that you gave cover every step")
        covering = sorted({*given, *wanted})
        return Contribution(
            nothing="the capture sizes that you gave stand",
            notes=(
                f"cudagraph_capture_sizes {list(given)} with {query} tokens a request leave full decode graphs of "
                f"{kept} tokens: {_describe(missing, kept, query)}. This list would cover them: {covering}",
                *notes,
            ),
        )

    base = default_sizes(facts)
    if ceiling is not None:
        beyond = [size for size in wanted if size > ceiling]
        wanted = [size for size in wanted if size <= ceiling]
        if beyond:
            notes = (
                f"max_cudagraph_capture_size {ceiling} stands: steps of {beyond[0] // query} and more requests "
                f"({beyond[0]} tokens) run without a full decode graph; {beyond[-1]} would cover all",
                *notes,
            )
    missing = [size for size in wanted if size not in kept_sizes(base, query, serving, runner)]
    if not missing:
        return Contribution(superseded="this build's own capture sizes cover every step", notes=notes)
    # vLLM refuses a list whose largest entry, after it cut the list at max_num_batched_tokens, is not the user's
    # max_cudagraph_capture_size.
    if ceiling is not None and ceiling > (serving.max_num_batched_tokens or ceiling):
        return Contribution(
            nothing=f"with max_cudagraph_capture_size {ceiling} above max_num_batched_tokens "
            f"{serving.max_num_batched_tokens} vLLM accepts no list: lower it to have steps covered",
            notes=notes,
        )
    sizes = sorted({*base, *wanted, *([ceiling] if ceiling is not None else [])})
    note = f"{len(missing)} capture sizes added, from {missing[0]} to {missing[-1]} tokens ({query} a request)"
    if mode:
        note += f", cudagraph_mode {mode}"
    return Contribution(args={"compilation_config.cudagraph_capture_sizes": sizes}, notes=(note, *notes))


def wanted_sizes(query: int, max_num_seqs: int, max_tokens: int | None, options: Mapping[str, Any]) -> list[int]:
    """Tokens of the decode steps to cover, ascending: n x ``query`` for every n up to ``exact_requests``, then in
    steps of 8 requests to 256 and of 16 above, the last one at the most requests a replica serves."""
    most = min(max_num_seqs, options.get("max_requests") or max_num_seqs)
    limits = [limit for limit in (max_tokens, options.get("max_tokens")) if limit]
    if limits:
        most = min(most, min(limits) // query)
    exact = options.get("exact_requests") or 0
    counts = {n for n in range(1, most + 1) if n <= exact or n in (1, 2, 4) or (n % 8 == 0 if n <= 256 else n % 16 == 0)}
    return [n * query for n in sorted(counts | ({most} if most else set()))]


def default_sizes(facts: Facts) -> list[int]:
    """The list that the build makes where the user gives none, ascending, in tokens."""
    serving = facts.serving
    release = _release(facts)
    query = 1 + (serving.num_speculative_tokens or 0)
    seqs = serving.max_num_seqs or 0
    # Between 0.26 and 0.28 the ceiling of Blackwell rose; the higher one loses nothing that the build would cover.
    blackwell = release > (0, 26) and re.fullmatch(r"sm10\d[a-z]?", facts.hardware.arch or "") is not None
    ceiling = 1024 if blackwell else 512
    most = serving.max_cudagraph_capture_size
    uniform: list[int] = []
    if most is None:
        # vllm-ascend sets the largest size itself, without the factor of two (NPUPlatform, 0.23.0).
        most = min(seqs * query * (1 if facts.hardware.platform == "ascend" else 2), ceiling)
        if release >= (0, 30):
            counts = [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16)) if n <= seqs]
            uniform = [n * query for n in {*counts, min(seqs, ceiling)} if n * query <= most]
    tokens = serving.max_num_batched_tokens
    if tokens is not None:
        most = min(most, tokens)
        uniform = [size for size in uniform if size <= tokens]
    small = range(1, 33) if serving.performance_mode == "interactivity" else (1, 2, 4)
    sizes = {size for size in (*small, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most}
    if tokens is not None and tokens <= most and release >= (0, 23):
        sizes.add(tokens)
    return sorted(sizes.union(uniform))


def kept_sizes(sizes: Iterable[int], query: int, serving: Any, runner: str) -> list[int]:
    """Tokens of the full decode graphs that vLLM captures when it is given ``sizes``, ascending."""
    tokens = serving.max_num_batched_tokens
    sizes = sorted({size for size in sizes if tokens is None or size <= tokens})
    if not sizes:
        return []
    if (serving.cudagraph_mode or "").upper() == "PIECEWISE":  # no uniform decode graphs: any size serves by padding
        return sizes
    most = sizes[-1]
    rounded = {-(-size // query) * query for size in sizes}
    kept = {size for size in rounded if size <= most}
    if not kept and query <= most and runner != "V2":
        kept = {query}
    return sorted(size for size in kept if size <= serving.max_num_seqs * query)


def _release(facts: Facts) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", facts.build.public or "0")[:2])


def _limits(query: int, seqs: int, wanted: list[int], options: Mapping[str, Any]) -> tuple[str, ...]:
    last = wanted[-1] // query
    if last >= min(seqs, options.get("max_requests") or seqs):
        return ()
    return (
        f"steps of more than {last} requests ({wanted[-1]} tokens) run without a full decode graph: the limit is "
        f"max_num_batched_tokens or this patch's max_tokens ({options.get('max_tokens')})",
    )


def _describe(missing: list[int], kept: list[int], query: int) -> str:
    largest = kept[-1] if kept else 0
    without = [size for size in missing if size > largest]
    padded = [size for size in missing if size <= largest]
    parts = []
    if without:
        parts.append(f"steps of {_some([n // query for n in without])} requests run without a full decode graph")
    if padded:
        parts.append(f"steps of {_some([n // query for n in padded])} requests are padded to a larger one")
    return ", ".join(parts)


def _some(numbers: list[int]) -> str:
    if len(numbers) <= 6:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}, {numbers[1]} ... {numbers[-1]} ({len(numbers)} counts)"
