"""Greedy tokens from logits in the model's own dtype.

V1's ``Sampler.forward`` turns all logits into float32 before it takes their argmax, and the rejection sampler does so for
the bonus rows (twice: it always asks its sampler for raw logits) and for the target rows (with a clone on top). Converting
bf16 or fp16 to float32 keeps every value, and with it order, ties and NaN, so the argmax of the original rows is the same
token. Where nothing needs float32 or log-probabilities, one argmax over the rows as they are replaces all of it; under
speculation its result goes to the build's own greedy kernel. For 2 to 64 rows on NVIDIA's devices the sampler's argmax is a
kernel of one launch (``patches/_lib/argmax.py``); for one row PyTorch's is one launch too, and costs the host less.

Two traps: the min-tokens and logit-bias processors are always present, mostly with nothing to do, so what counts is
whether they hold an entry; and the rejection sampler calls the sampler with ``max_num_logprobs = -1`` whether or not a
request wants log-probabilities, so its own metadata decides.
"""

from __future__ import annotations

import sys
from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target
from patches._lib.v1_fingerprints import seen

PATCH = Patch(
    id="greedy-native-dtype",
    kind=Kind.CODE,
    summary="Greedy argmax on bf16/fp16 logits where nothing needs float32 (V1 sampler and rejection sampler)",
    why=(
        "The float32 copy reads V x B x 2 bytes and writes V x B x 4 each step, and under speculation the rejection "
        "sampler makes up to four such copies of every row."
    ),
    remove_when="V1's samplers convert only where a request needs it (as V2 does since 0.28), or V1 is gone",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            "vllm.v1.sample.sampler:Sampler.forward",
            "sample",
            fingerprints=seen("c32974140a3addaf ad6db39c3f9ea15a = = = 0b168c0261f82f56"),
        ),
        Target(
            "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
            "reject",
            fingerprints=seen("2ca3b6d9c7c1c049 1582663920ac675d = = = 1e64f76acbdd792d"),
        ),
    ),
    assumes=(
        Target(
            "vllm.v1.sample.sampler:Sampler.apply_logits_processors",
            fingerprints=seen("c9d6cbd370f2d55d 6a82b7ee35720931 8128fdeba7265046 = = ="),
        ),
        Target("vllm.v1.sample.sampler:Sampler.sample", fingerprints=seen("51a5e2a059e495d0 d1ad0ddd23d280d4 = = = =")),
        Target("vllm.v1.sample.sampler:Sampler.greedy_sample", fingerprints=seen("454ec76d0a1ce184 = = = 2b9907452e084089 =")),
        Target(
            "vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors",
            fingerprints=seen("4709994cbe23527d a6c4042edfbb2f90 9426544899a8ac57 = e127c0c51f3d8c72 ="),
        ),
        Target(
            "vllm.v1.sample.rejection_sampler:rejection_sample",
            fingerprints=seen("51b6de25ffec24bb 0d0b9c63b3684d31 = = 9528c1eebb0b875f 09857f490feff94e"),
        ),
        Target("vllm.v1.sample.rejection_sampler:apply_sampling_constraints", fingerprints=seen("adea838e9968bd25 = = = = =")),
        Target(
            "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.apply",
            fingerprints=seen("3f20f847f2ed9a19 = = = e1c6159cb8a55e87 ="),
        ),
        Target(
            "vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor.apply",
            fingerprints=seen("9aba3adc3b789cea = = = = ="),
        ),
    ),
    # Not on the CPU platform: from 0.32 on its greedy kernel takes float32 only.
    condition=Condition(vllm=">=0.18.1,<0.34", runner="V1", platforms=("cuda", "rocm", "dcu")),
    live=("model_runner.sampler",),
    tests="tests/v1/test_greedy_native_dtype.py",
    measured="ab_runs/results/host/h200_qwen3_0.6b.yaml",
)

count = Counters(PATCH.id)

_LOW_WORD_FIRST = sys.byteorder == "little"


def needs_float32(logits: Any, metadata: Any) -> str | None:
    """Why the original must run, or None where the argmax of ``logits`` (any number of rows) is its whole result."""
    import torch
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor

    if not metadata.all_greedy:
        return "not all greedy"
    if logits.dtype is not torch.bfloat16 and logits.dtype is not torch.float16:
        return "logits dtype"
    if metadata.max_num_logprobs is not None or getattr(metadata, "logprob_token_ids", None):
        return "logprobs"
    if not metadata.no_penalties:
        return "penalties"
    if metadata.allowed_token_ids_mask is not None:
        return "allowed token ids"
    if metadata.bad_words_token_ids:
        return "bad words"
    for processor in metadata.logitsprocs.non_argmax_invariant:
        kind = type(processor)
        if kind is MinTokensLogitsProcessor:
            if processor.min_toks:
                return "min tokens"
        elif kind is LogitBiasLogitsProcessor:
            if processor.biases:
                return "logit bias"
        else:
            return "a custom logits processor"
    holder = getattr(metadata, "thinking_budget_state_holder", None)
    if holder is not None and holder.has_tracked_requests():
        return "thinking budget"
    return None


def _stock_sampler(sampler: Any) -> bool:
    from vllm.v1.sample.sampler import Sampler

    return type(sampler) is Sampler


def sample(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``Sampler.forward``: logits [requests, vocabulary] -> token ids int32 [requests, 1]."""
    logits = args[0] if args else kwargs["logits"]
    metadata = args[1] if len(args) > 1 else kwargs["sampling_metadata"]
    reason = needs_float32(logits, metadata) if _stock_sampler(instance) else "another sampler"
    if reason is not None:
        count.refuse(reason)
        if reason == "not all greedy":
            _warm(logits)
        return wrapped(*args, **kwargs)
    import torch
    from vllm.v1.outputs import SamplerOutput

    count.hit()
    single = logits.shape[0] == 1 and _LOW_WORD_FIRST
    tokens = None if single else _in_one_launch(logits)
    if tokens is None:
        tokens = logits.argmax(dim=-1, keepdim=True)
        if single:
            tokens = tokens.view(torch.int32)[:, :1]  # the low word is the id: a view in place of a conversion's launch
        else:
            tokens = tokens.to(torch.int32)
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)


_kernel: Any = None  # patches._lib.argmax; False where it cannot be used
_compiled: set[tuple[Any, int, int]] = set()


def _the_kernel(logits: Any) -> Any:
    """The module of the fused argmax, or None where ``logits`` are not for it."""
    global _kernel
    if _kernel is None:
        import torch

        from patches._lib.v1_decode_state import kernels_run

        # HIP was never tried: a missed ordering there would be a wrong token
        _kernel = False
        if torch.version.hip is None and kernels_run(logits.device):
            try:
                from patches._lib import argmax as _kernel
            except ImportError:
                count.add("no fused argmax: no Triton")
    return _kernel if _kernel and _kernel.takes(logits) else None


def _in_one_launch(logits: Any) -> Any:
    """Token ids int32 [rows, 1] by the fused argmax, or None where PyTorch's has to do."""
    kernel = _the_kernel(logits)
    if kernel is None:
        return None
    try:
        tokens = kernel.argmax(logits)
    except Exception as error:
        _give_up(error)
        return None
    count.add("fused argmax")
    return tokens


def _warm(logits: Any) -> None:
    """Compile the fused argmax for logits of this kind, once: vLLM's own warm-up samples, but never greedily."""
    key = (logits.dtype, logits.stride(0), logits.shape[-1])
    if key in _compiled:
        return
    _compiled.add(key)
    row = logits[:1]  # a dummy run has more rows than the kernel takes
    kernel = _the_kernel(row)
    if kernel is not None and logits.is_cuda:
        try:
            kernel.compile_for(row)
        except Exception as error:
            _give_up(error)


def _give_up(error: Exception) -> None:
    """It does not compile here: PyTorch's argmax from now on."""
    global _kernel
    import logging

    _kernel = False
    count.add(f"no fused argmax: {type(error).__name__}")
    logging.getLogger("vllm.overlay").warning("%s: the fused argmax does not run; it stays out", PATCH.id, exc_info=error)


def reject(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``RejectionSampler.forward``: logits [draft rows + requests, vocabulary] -> int32 [requests, max drafts + 1].

    ``metadata.target_logits_indices`` names the row of each draft token, ``metadata.bonus_logits_indices`` that of each
    request's bonus token. Rejected places hold -1.
    """
    names = ("metadata", "draft_probs", "logits", "sampling_metadata")
    given = dict(zip(names, args, strict=False)) | kwargs
    metadata, logits, sampling = given["metadata"], given["logits"], given["sampling_metadata"]
    reason = _rejection_reason(instance, metadata) or needs_float32(logits, sampling)
    if reason is not None:
        count.refuse(f"speculation: {reason}")
        return wrapped(*args, **kwargs)
    import torch
    from vllm.v1.outputs import SamplerOutput

    count.hit()
    count.add("speculation")
    best = logits.argmax(dim=-1)
    output = _greedy_kernel(
        metadata,
        best[metadata.target_logits_indices],
        best[metadata.bonus_logits_indices].to(torch.int32).unsqueeze(-1),
    )
    return SamplerOutput(sampled_token_ids=output, logprobs_tensors=None)


def _rejection_reason(instance: Any, metadata: Any) -> str | None:
    from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN, RejectionSampler

    if type(instance) is not RejectionSampler or not _stock_sampler(instance.sampler):
        return "another sampler"
    if getattr(instance, "synthetic_mode", False) or getattr(instance, "use_fly", False):
        return "another acceptance rule"
    if metadata.max_spec_len > MAX_SPEC_LEN or not metadata.draft_token_ids.is_contiguous():
        return "drafts the original does not take"
    return None


def _greedy_kernel(metadata: Any, target_argmax: Any, bonus: Any) -> Any:
    """The build's greedy rejection kernel on tokens that are already chosen.

    target_argmax: int64 [draft tokens]. bonus: int32 [requests, 1]. Returns int32 [requests, max drafts + 1].
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    requests = len(metadata.num_draft_tokens)
    output = torch.full(
        (requests, metadata.max_spec_len + 1),
        rejection_sampler.PLACEHOLDER_TOKEN_ID,
        dtype=torch.int32,
        device=target_argmax.device,
    )
    arguments = [
        output,
        metadata.cu_num_draft_tokens,
        metadata.draft_token_ids,
        target_argmax,
        bonus,
        None,  # is_greedy: every request is
        metadata.max_spec_len,
    ]
    launch = getattr(rejection_sampler, "_rejection_greedy_sample", None)
    if launch is not None:  # 0.32: a dispatcher in front of the kernel
        launch(*arguments, None, None)
    elif hasattr(rejection_sampler, "unconditional_to_conditional_rates"):  # 0.23: synthetic acceptance exists
        rejection_sampler.rejection_greedy_sample_kernel[(requests,)](*arguments, None, None, SYNTHETIC_MODE=False)
    else:
        rejection_sampler.rejection_greedy_sample_kernel[(requests,)](*arguments)
    return output
