"""Greedy tokens from sharded logits: gather (value, index) pairs in place of the whole vocabulary.

``LogitsProcessor.forward`` gathers [rows, vocabulary] logits over the tensor-parallel ranks although a greedy step only
wants each row's largest token. While a draft is made, and while ``execute_model`` computes the target's logits, it
returns the rank's own part here (``ShardedLogits``). Whether the part suffices is decided where everything that can
change a token is known: the draft's argmax always, and for the target and plain decode in ``_sample``, after the
output ids of the step before have arrived. Where it does not suffice, the original gathers it there.

For verification the ids found go straight into the rejection sampler's greedy comparison, in the place of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.runtime import Counters
from overlay.spec import REPLACE, Check, Condition, Exactness, Kind, Option, Patch, Target, at_least

PATCH = Patch(
    id="ascend-vocab-parallel-argmax",
    kind=Kind.CODE,
    summary="Greedy draft, verification and decode gather (value, index) pairs, not the vocabulary",
    why=(
        "Every step gathers [rows, vocabulary] over the ranks: 248320 values a row for Qwen3.5 where two a rank "
        "suffice. Together with the min-tokens mask cache c1 TPOT went from 7.02 to 5.0 ms on an Ascend 910C in a "
        "report by others; not measured here."
    ),
    remove_when="vllm-ascend honours use_local_argmax_reduction for its drafter and its samplers",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm.model_executor.layers.logits_processor:LogitsProcessor.forward",
            use="make_forward",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "b36f77792833f9f0"},
        ),
        Target(
            at="vllm_ascend.spec_decode.llm_base_proposer:AscendSpecDecodeBaseProposer._run_merged_draft",
            use="make_draft",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "0db3063207becda0"},
        ),
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner.execute_model",
            use="make_execute",
            how=REPLACE,
            fingerprints={"vllm-ascend 0.23.0": "fcd04f6a00d78cb1"},
        ),
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner._sample",
            use="sample",
            fingerprints={"vllm-ascend 0.23.0": "212582a135c6bcf5"},
        ),
    ),
    assumes=(
        Target(
            at="vllm_ascend.ops.vocab_parallel_embedding:AscendLogitsProcessor._get_logits",
            fingerprints={"vllm-ascend 0.23.0": "76aa9e6cd4ab7aa8"},
        ),
        Target(
            at="vllm_ascend.ops.vocab_parallel_embedding:AscendLogitsProcessor._get_logits_normal",
            fingerprints={"vllm-ascend 0.23.0": "b7ebe99c161c87e3"},
        ),
        Target(
            at="vllm_ascend.sample.rejection_sampler:rejection_sample",
            fingerprints={"vllm-ascend 0.23.0": "a2a748feb38ef078"},
        ),
        Target(
            at="vllm_ascend.sample.rejection_sampler:AscendRejectionSampler.forward",
            fingerprints={"vllm-ascend 0.23.0": "3e8abf585baaba1d"},
        ),
        Target(
            at="vllm_ascend.worker.model_runner_v1:NPUModelRunner.sample_tokens",
            fingerprints={"vllm-ascend 0.23.0": "58a925e13753c4bc"},
        ),
        Target(
            at="vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.apply",
            fingerprints={"vllm-ascend 0.23.0": "3f20f847f2ed9a19"},
        ),
        Target(
            at="vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.apply_with_spec_decode",
            fingerprints={"vllm-ascend 0.23.0": "81564b885bdd5eb3"},
        ),
        Target(
            at="vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.update_state",
            fingerprints={"vllm-ascend 0.23.0": "333c3766fef50af8"},
        ),
    ),
    condition=Condition(
        plugins={"vllm_ascend": "==0.23.0"},
        platforms=("ascend",),
        runner="V1",
        facts={
            "serving.tensor_parallel": at_least(2),
            "serving.pipeline_parallel": 1,
            "serving.lora": False,
            "serving.speculative_method": Check(
                "none or mtp", lambda method: not method or method == "mtp" or method.endswith("_mtp")
            ),
        },
    ),
    options={"draft": Option(True, "the drafter's argmax as well"), "target": Option(True, "verification and decode")},
    after_call="vllm_ascend.worker.worker:NPUWorker.__init__",
    live=("model_runner",),
    verified="simulated",
    tests="tests/ascend/test_vocab_parallel_argmax.py",
)

count = Counters(PATCH.id)

_wanted: list[str] = []  # what is being computed now, innermost last: "draft" or "target"


def _inside(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A factory of functions during which ``LogitsProcessor.forward`` may return shards for ``name``."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
            from overlay.runtime import options

            _wanted.append(name if options(PATCH.id).get(name, True) else "")
            try:
                return original(self, *args, **kwargs)
            finally:
                _wanted.pop()

        return marked

    return make


make_draft = _inside("draft")
make_execute = _inside("target")


def make_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """``LogitsProcessor.forward``: sharded where a consumer that knows them waits, else the original."""

    def forward(self: Any, lm_head: Any, hidden_states: Any, embedding_bias: Any = None) -> Any:
        if not _wanted or not _wanted[-1]:
            return original(self, lm_head, hidden_states, embedding_bias)
        from patches._lib.ascend_sharded_logits import ShardedLogits, given_shard, head_refusal

        reason = _setting_refusal() or head_refusal(self, lm_head)
        if reason:
            count.refuse(f"{_wanted[-1]}: {reason}")
            return original(self, lm_head, hidden_states, embedding_bias)
        shard = lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)
        return ShardedLogits(
            self, lm_head, shard, lambda part: original(self, given_shard(part), hidden_states, embedding_bias)
        )

    return forward


def _setting_refusal() -> str | None:
    import vllm.envs as envs

    from patches._lib.ascend_greedy import ascend_settings_refusal

    if envs.VLLM_COMPUTE_NANS_IN_LOGITS:
        return "VLLM_COMPUTE_NANS_IN_LOGITS"
    return ascend_settings_refusal()


def sample(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``NPUModelRunner._sample``: tokens of sharded logits where the batch is plainly greedy, else of gathered ones."""
    from patches._lib.ascend_greedy import argmax_processors_refusal, plain_greedy_refusal
    from patches._lib.ascend_sharded_logits import ShardedLogits

    given = {**dict(zip(("logits", "spec_decode_metadata"), args, strict=False)), **kwargs}
    logits, spec = given["logits"], given["spec_decode_metadata"]
    if not isinstance(logits, ShardedLogits):
        return wrapped(*args, **kwargs)
    # Under asynchronous scheduling the output ids, whose number MinTokens counts, arrive only here.
    instance.input_batch.update_async_output_token_ids()
    metadata = instance.input_batch.sampling_metadata
    reason = plain_greedy_refusal(metadata, logprobs=metadata.max_num_logprobs) or argmax_processors_refusal(
        metadata, min_tokens=True
    )
    if reason:
        count.refuse(reason)
        return wrapped(logits.full(), spec)
    count.hit()
    return _tokens(instance, logits, spec, metadata)


def _tokens(runner: Any, logits: Any, spec: Any, metadata: Any) -> Any:
    import torch
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
    from vllm_ascend.sample import rejection_sampler

    from patches._lib.ascend_greedy import Presampled
    from patches._lib.ascend_sharded_logits import min_tokens_masks

    processors = [
        processor
        for processor in metadata.logitsprocs.non_argmax_invariant
        if type(processor) is MinTokensLogitsProcessor and processor.min_toks
    ]
    if spec is None:
        part = logits.part(own=bool(processors))
        for processor in processors:
            (mask,) = min_tokens_masks(processor, logits, None, part.device)
            _forbid(part, mask)
        ids = logits.best(part).to(torch.int32)
        return SamplerOutput(sampled_token_ids=ids.unsqueeze(-1), logprobs_tensors=None)

    target = logits.part(spec.target_logits_indices, clean=True, wide=bool(processors))
    bonus = logits.part(spec.bonus_logits_indices)
    for processor in processors:
        on_drafts, on_bonus = min_tokens_masks(processor, logits, spec.num_draft_tokens, target.device)
        _forbid(target, on_drafts)
        _forbid(bonus, on_bonus)
    ids = logits.best(target, bonus)
    drafts = target.shape[0]
    output = rejection_sampler.rejection_sample(
        spec.draft_token_ids,
        spec.num_draft_tokens,
        spec.max_spec_len,
        spec.cu_num_draft_tokens,
        None,
        Presampled(ids[:drafts]),
        ids[drafts:].to(torch.int32).unsqueeze(-1),
        metadata,
    )
    return SamplerOutput(sampled_token_ids=output, logprobs_tensors=None)


def _forbid(part: Any, mask: Any) -> None:
    if mask is not None:
        part[mask] = float("-inf")
