"""Argmax and constants in place of the general sampling tail, for batches that sample greedily only.

With temperature 0 for every request and nothing to change or report about the logits, the V2 runner's ``Sampler`` still
gathers positions and token ids, draws through its Gumbel kernel (per block, then an argmax and a gather over the blocks),
and computes the number of sampled tokens with a kernel that can only say one each. The same tokens come from one argmax
a row, the same counts from constants; the copy of a constant back to the host is left out too. (In 0.23.0 the runner
itself runs the counting kernel over the constant: it writes the ones that are there.)

Ties: the lowest index wins, in both. Logits that hold NaN have no defined maximum: the original's choice among them
depends on its reduction order, this patch's on its own.

Every step proves, from the host's own copies of the request states, that the batch is of that kind. What is decided for
a batch holds until a request is added (``PenaltiesState.add_request`` runs for each), for the same rows by content.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target
from patches._lib.v2_fingerprints import seen

_SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"
_RUNNER = "vllm.v1.worker.gpu.model_runner"

PATCH = Patch(
    id="greedy-tail",
    kind=Kind.CODE,
    summary="V2 runner: greedy batches sample with one argmax and constants",
    why=(
        "A greedy step of the V2 runner launches two index kernels, a fill, the Gumbel kernel, an argmax, a gather and "
        "a count kernel after the logits, and copies two tensors back. Sampler.__call__ took 420 to 589 us a step on the "
        "host of an H200 (vLLM 0.26.0, Qwen3-0.6B, batch 1 and 8)."
    ),
    remove_when="vLLM's V2 sampler has a greedy path of its own",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at=f"{_SAMPLER}.__call__",
            use="call",
            fingerprints=seen("7c10efd8215d8a6c 07f05f039576a0ae 298fb79f8c4d3187 f495ab957ff90fd8 ="),
        ),
        Target(
            at="vllm.v1.worker.gpu.sample.penalties:PenaltiesState.add_request",
            use="add_request",
            fingerprints=seen("d78d0853e86eb49d = = f22a32f2407481a3 ="),
        ),
        Target(
            at="vllm.v1.worker.gpu.async_utils:AsyncOutput.__init__",
            use="async_output",
            fingerprints=seen("a54330e87d89ebb3 6eebbde41ce9f26c b9eb3cd42a74c01b e1b5ec1efcf07ed0 ="),
        ),
    ),
    assumes=(
        Target(
            at=f"{_SAMPLER}.add_request",
            fingerprints=seen("3c67a80ffd5132de = 4ac9a56926ae2299 4f911bab67889c19 ="),
        ),
        Target(
            at=f"{_SAMPLER}.sample",
            fingerprints=seen("35ec2b8df75d07ce 7aa0e66c9375874a 7fb3b922c2c329b4 9d3cd2772fab67dd 3096a8aa0bb7b223"),
        ),
        Target(
            at=f"{_SAMPLER}.apply_sampling_params",
            fingerprints=seen("2245a7596b003f65 96a4e09e028a3648 9def2e4f24508bd1 bf2bc7db48282cdd ="),
        ),
        Target(
            at="vllm.v1.worker.gpu.sample.states:SamplingStates",
            fingerprints=seen("780ddb2f0be27cd1 cdbf94e18fed42ba = 8ce3bdd11a1cc074 6b0d7b76fd16425a"),
        ),
        Target(
            at="vllm.v1.worker.gpu.sample.logprob:LogprobTokenIdsState",
            fingerprints=seen("18c8621b4d73193d = = = ="),
        ),
        Target(
            at="vllm.v1.worker.gpu.sample.gumbel:_gumbel_sample_kernel",
            fingerprints=seen("eabd9b0d99f9faf4 18d82ab2c0953ce4 c0095baa87b38ca8 010f92aa7cd74bad ="),
        ),
        Target(
            at="vllm.v1.worker.gpu.sample.output:SamplerOutput",
            fingerprints=seen("0e0c7efbf793a5b7 e9e731a648dc749b 654f33b99853184d dc9898a8a1cf6c21 ="),
        ),
        Target(
            at="vllm.v1.worker.gpu.input_batch:_get_num_sampled_and_rejected_kernel",
            fingerprints=seen("df5dddd405f46d5d = = = ="),
        ),
        Target(
            at="vllm.v1.worker.gpu.input_batch:_post_update_kernel",
            fingerprints=seen("f33ca26a5182813e = = = ff3563b4f3959a20"),
        ),
        Target(
            at="vllm.v1.worker.gpu.async_utils:async_copy_to_np",
            fingerprints=seen("2688456fc795a576 = = eb250a73be466b1e ="),
        ),
        Target(
            at=f"{_RUNNER}:GPUModelRunner.sample",
            fingerprints=seen("29931dd63ee7b381 edbb074d0561ac37 = 8aa62d77bd2a7373 ="),
        ),
        Target(
            at=f"{_RUNNER}:GPUModelRunner.sample_tokens",
            fingerprints=seen("8ea42cc03ae8983a 4c2308c6a815b3c3 30c623a9923d377c c8d788da82fb68e0 3a660f71d523963b"),
        ),
    ),
    condition=Condition(
        vllm=">=0.23.0,<0.34",
        runner="V2",
        platforms=("cuda", "rocm", "dcu"),
        facts={"serving.num_speculative_tokens": 0, "serving.pipeline_parallel": 1},
    ),
    live=("model_runner.sampler",),
    tests="tests/v2/cases/case_greedy_tail.py",
    measured="ab_runs/results/host/h200_qwen3_0.6b.yaml",
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
    reason = refusal(sampler, batch, logits)
    if reason is not None:
        count.refuse(reason)
        return wrapped(*args, **kwargs)
    count.hit()
    return _greedy(logits)


def refusal(sampler: Any, batch: Any, logits: Any = None) -> str | None:
    """Why this step takes the original: decided by what cannot change under it, or by this step's own lengths."""
    if type(sampler).__qualname__ != "Sampler":
        return "a sampler class of its own"
    if batch.num_draft_tokens or sampler.num_speculative_tokens != 1:
        return "speculation"
    if logits is not None and logits.shape[0] != batch.num_reqs:
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


def counts(device: Any, n: int) -> tuple[Any, Any, Any]:
    entry = _constants.get((device, n))
    if entry is None:
        import numpy as np
        import torch

        host = np.ones(n, dtype=np.int32)
        host.setflags(write=False)
        entry = _constants[(device, n)] = (
            torch.ones(n, dtype=torch.int32, device=device),
            torch.zeros(n, dtype=torch.int32, device=device),
            host,
        )
        _ones[id(entry[0])] = entry
    return entry


def _greedy(logits: Any) -> Any:
    import torch

    sampled = torch.empty((logits.shape[0], 1), dtype=torch.int64, device=logits.device)
    argmax(logits, sampled)
    return output_of(sampled)


def argmax(logits: Any, sampled: Any) -> None:
    """Write the index of each row's largest logit, the lowest of equals. logits: float [n, vocab]; sampled: int64 [n, 1]."""
    from patches._lib.v2_decode_kernels import row_argmax_kernel

    n, vocab_size = logits.shape
    row_argmax_kernel[(n,)](logits, logits.stride(0), sampled, vocab_size, BLOCK=_BLOCK, num_warps=16)


def output_of(sampled: Any) -> Any:
    """The ``SamplerOutput`` of one token a request, without logprobs. sampled: int64 [n, 1]."""
    from vllm.v1.worker.gpu.sample import sampler as module

    ones, zeros, _ = counts(sampled.device, sampled.shape[0])
    values = {"sampled_token_ids": sampled, "logprobs_tensors": None, "num_nans": None, "num_sampled": ones}
    if "num_rejected" in module.SamplerOutput.__dataclass_fields__:
        values["num_rejected"] = zeros
    return module.SamplerOutput(**values)


class _HostCopy:
    """Stands for the constant where its copy to the host is asked for: the copy exists."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def to(self, *args: Any, **kwargs: Any) -> _HostCopy:
        return self

    def numpy(self) -> Any:
        return self.host


def async_output(wrapped: Any, output: Any, args: tuple, kwargs: dict) -> Any:
    """The number of sampled tokens does not travel from the device where it is the constant."""
    entry = _ones.get(id(kwargs.get("num_sampled_tokens")))
    if entry is not None:
        kwargs = {**kwargs, "num_sampled_tokens": _HostCopy(entry[2])}
    return wrapped(*args, **kwargs)
