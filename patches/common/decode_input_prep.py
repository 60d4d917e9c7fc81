"""Prepare the inputs of a pure decode step in one kernel launch.

Under asynchronous scheduling the tokens of the step before are already on the device, and in a decode step of N requests
with one token each everything else that the model reads follows from N positions. V1's general ``_prepare_inputs``
nevertheless makes about seven copies and eleven small kernels for it. This patch writes all of it with one Triton kernel
(one request: its position is a number in the launch; more: their positions are those that the launch before left on the
device plus one, else one copy), keeps the host's arrays as the original leaves them, and hands every other step to the
original.

Two gates. The first, once a runner: may this service use it at all (asynchronous scheduling, no speculation, LoRA,
pipeline or context parallelism, prompt embeddings, encoder-decoder, XD-RoPE, micro-batches). The second, every step: one
token each, nobody new, resumed or with encoder inputs, the same rows as in the step before, its tokens on the device, all
past their prompt, and lengths that continue those of the step before. It proves the result from the step's own data.

The option ``shadow`` runs the original behind the fast path and compares every integer on the device and the host. A
difference is counted and logged, the original's values stand, and the runner goes on without the fast path.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters, options
from overlay.spec import Condition, Exactness, Kind, Option, Patch, Target
from patches._lib.v1_fingerprints import own_runner, seen  # noqa: F401 - own_runner is named in the condition

PATCH = Patch(
    id="decode-input-prep",
    kind=Kind.CODE,
    summary="Prepare a decode step's inputs in one kernel launch (V1, asynchronous scheduling)",
    why=(
        "About seven copies and eleven kernels a step outside the graph at batch 1. Measured alone on one H200 (vLLM 0.26.0, "
        "one request at position 24576): 373 us until the device is done, 70 us fused; published for a BW1000: 259 and 101."
    ),
    remove_when="V1 prepares decode steps on the device, or V1 is gone",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
            "prepare",
            fingerprints=seen("58943afcbd9df317 ea372394b199346e 0d90285fdec99a41 90daf506896048b9 01c2078e58d1a486 ="),
        ),
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.capture_model",
            "warm",
            fingerprints=seen("24ff104e5380705d d0bd6792caa87cfc d10ee84234e15048 = = ="),
        ),
    ),
    assumes=(
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids",
            fingerprints=seen("2e4a560932c984cb 7eec1205b160d962 e1a43e355d8c10c6 29167bf4141174c5 283d9e18bcd40217 ="),
        ),
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_mrope_positions",
            fingerprints=seen("e2b3c13ca29a8616 = = = = ="),
        ),
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
            fingerprints=seen("2cc9e5d7532566b0 ecb9086bafe6899e = 3e4776e0bd69b9cb 301d6d93164758e9 ="),
        ),
        Target(
            "vllm.v1.worker.block_table:BlockTable.compute_slot_mapping",
            fingerprints=seen("ab901d438bbddda8 550fb9b7b98241d0 82d002c79b97b040 = fa978146b6e993c6 ="),
        ),
        Target(
            "vllm.v1.worker.block_table:BlockTable.__init__",
            fingerprints=seen("b90a7879225540d1 = 3dbd8a9bbe3d416e = 16af8003084bc803 ="),
        ),
    ),
    condition=Condition(
        vllm=">=0.18.1,<0.34",
        runner="V1",
        platforms=("cuda", "rocm", "dcu"),
        facts={
            "serving.async_scheduling": True,
            "serving.speculative_method": "",
            "serving.lora": False,
            "serving.pipeline_parallel": 1,
            "serving.decode_context_parallel": 1,
            "serving.prefill_context_parallel": 1,
            "serving.prompt_embeds": False,
            "serving.ubatching": False,
            "serving.routed_experts": False,
            "model.encoder_decoder": False,
        },
        also="own_runner",
    ),
    options={
        "shadow": Option(False, "run the original as well every fast step and compare every integer (slow)"),
    },
    live=("model_runner",),
    tests="tests/v1/test_decode_input_prep.py",
    measured="ab_runs/results/host/h200_qwen3_0.6b.yaml",
)

count = Counters(PATCH.id)

_STATE = "_overlay_decode"  # on the runner: a Fast, or the reason why there is none


def service_reason(runner: Any) -> str | None:
    """The start gate: why this runner can never use the fast path, or None."""
    from patches._lib.v1_decode_state import kernels_run

    parallel, model = runner.parallel_config, runner.model_config
    checks = (
        ("no Triton kernels here", not kernels_run(runner.device)),
        ("no asynchronous scheduling", not runner.use_async_scheduling),
        ("speculation", runner.speculative_config is not None or bool(runner.num_spec_tokens)),
        ("LoRA", runner.lora_config is not None),
        ("pipeline parallel", parallel.pipeline_parallel_size != 1),
        ("decode context parallel", getattr(parallel, "decode_context_parallel_size", 1) != 1),
        ("prefill context parallel", getattr(parallel, "prefill_context_parallel_size", 1) != 1),
        ("prompt embeddings", bool(runner.enable_prompt_embeds)),
        ("encoder-decoder", bool(model.is_encoder_decoder)),
        ("XD-RoPE", bool(getattr(runner, "uses_xdrope_dim", 0))),
        ("micro-batches", bool(parallel.use_ubatching)),
        ("pooling model", bool(runner.is_pooling_model)),
        (
            "routed experts",
            bool(getattr(runner, "routed_experts_initialized", False))
            or bool(getattr(model, "enable_return_routed_experts", False)),
        ),
        ("Mamba state of all steps", getattr(runner, "mamba_prev_last_scheduled_idx", None) is not None),
    )
    return next((reason for reason, failed in checks if failed), None)


def step_reason(runner: Any, state: Any, output: Any, tokens: Any) -> tuple[str | None, list[int], list[int]]:
    """The step gate: (why the original must run or None, position per request, M-RoPE offset per request).

    output: the SchedulerOutput. tokens: scheduled tokens per request, int32 [requests].
    """
    import torch

    batch = runner.input_batch
    number = batch.num_reqs
    if output.total_num_scheduled_tokens != number or len(tokens) != number or tokens.max() != 1:
        return "more than one token", [], []
    cached = output.scheduled_cached_reqs
    if output.scheduled_spec_decode_tokens:
        return "draft tokens", [], []
    if output.scheduled_encoder_inputs:
        return "encoder inputs", [], []
    if output.scheduled_new_reqs:
        return "new requests", [], []
    if cached.resumed_req_ids:
        return "resumed requests", [], []
    sampled = batch.prev_sampled_token_ids
    if sampled is None:
        return "no tokens on the device", [], []
    if sampled.shape != (number, 1):
        return "another number of requests", [], []
    if sampled.dtype is not torch.int32 or not sampled.is_contiguous() or sampled.device != state.table.device:
        return "tokens of another kind", [], []
    if batch.req_prompt_embeds:
        return "prompt embeddings", [], []
    before = batch.prev_req_id_to_index
    if not before:
        return "rows moved", [], []
    positions = batch.num_computed_tokens_cpu[:number].tolist()
    lengths = state.lengths[:number].tolist()
    offsets: list[int] = []
    rope = state.rope is not None
    requests = runner.requests
    for row, name in enumerate(batch.req_ids):
        if before.get(name) != row:
            return "rows moved", [], []
        request, position = requests[name], positions[row]
        if position < request.num_prompt_tokens:
            return "prompt not done", [], []
        if request.num_tokens != position + 1:
            return "tokens do not continue", [], []
        if lengths[row] != position:
            return "lengths do not continue", [], []
        if rope:
            offset = request.mrope_position_delta
            if offset is None:
                return "no M-RoPE offset", [], []
            offsets.append(int(offset))
    return None, positions, offsets


def prepare(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``_prepare_inputs(scheduler_output, num_scheduled_tokens)``: the same buffers and the same return value."""
    output = args[0] if args else kwargs["scheduler_output"]
    tokens = args[1] if len(args) > 1 else kwargs["num_scheduled_tokens"]
    fast = instance.__dict__.get(_STATE)
    if fast is None:
        fast = instance.__dict__[_STATE] = service_reason(instance) or Fast()
    if isinstance(fast, str):
        count.refuse(f"service: {fast}")
        return wrapped(*args, **kwargs)
    state = fast.state_for(instance)
    if state is None:
        count.refuse(f"buffers: {fast.problem}")
        return wrapped(*args, **kwargs)
    if fast.rest is None:
        reason: str | None = "first step"
    else:
        reason, positions, offsets = step_reason(instance, state, output, tokens)
    if reason is not None:
        count.refuse(reason)
        result = wrapped(*args, **kwargs)
        fast.learn(result)
        return result
    number = len(positions)
    instance.input_batch.block_table.commit_block_table(number)
    state.launch(instance, positions, offsets)
    state.mirror(instance, positions, offsets)
    result = (state.logits_indices(number), None, *fast.rest)
    count.hit()
    if not fast.dispatched:
        fast.dispatched = True
        fast.say(f"dispatched its first decode step ({number} requests)")
    if options(PATCH.id).get("shadow"):
        return _shadow(wrapped, instance, args, kwargs, result)
    return result


def warm(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``capture_model``, the end of warm-up: make the state and compile the kernels, so that no request waits."""
    result = wrapped(*args, **kwargs)
    fast = instance.__dict__.get(_STATE)
    if fast is None:
        fast = instance.__dict__[_STATE] = service_reason(instance) or Fast()
    if isinstance(fast, Fast):
        fast.state_for(instance)
    return result


class Fast:
    """What one runner needs for the fast path. rest: what ``_prepare_inputs`` returns behind its first two values."""

    def __init__(self) -> None:
        self.state: Any = None
        self.problem = ""
        self.compiled = False
        self.dispatched = False
        self.rest: tuple[int, ...] | None = None

    def say(self, what: str) -> None:
        """One line in vLLM's log: which of "may be used" and "is used" is true can be told from it."""
        import logging

        logging.getLogger("vllm.overlay").info("%s: %s", PATCH.id, what)

    def state_for(self, runner: Any) -> Any | None:
        """The buffers' state, rebuilt where they moved; None where they are not as expected (see ``problem``)."""
        from patches._lib.v1_decode_state import DecodeState, Unsupported

        if self.state is not None and not self.state.moved(runner):
            return self.state
        if self.problem == "the kernel does not compile":
            return None
        try:
            self.state = DecodeState(runner)
            count.add("built")
            self.say("reserved its decode input state")  # eligible, not yet used
        except Unsupported as problem:
            self.state, self.problem = None, str(problem)
            return None
        if not self.compiled:
            try:
                self.state.compile()
                self.compiled = True
            except Exception:
                import logging

                self.state, self.problem = None, "the kernel does not compile"
                logging.getLogger("vllm.overlay").exception("%s: %s; it stays out", PATCH.id, self.problem)
        return self.state

    def learn(self, result: Any) -> None:
        """From 0.28 on a third value is returned: the most tokens sampled for one request, 1 in plain decode."""
        self.rest = (1,) * (len(result) - 2)


def _shadow(wrapped: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Run the original over the fast path's result and compare; on a difference give up the fast path."""
    from patches._lib.v1_decode_shadow import differences, snapshot

    mine = snapshot(runner, result)
    original = wrapped(*args, **kwargs)
    different = differences(mine, snapshot(runner, original))
    if not different:
        count.add("shadow equal")
        return original
    import logging

    count.add("shadow different")
    runner.__dict__[_STATE] = "shadow found a difference"
    logging.getLogger("vllm.overlay").error(
        "%s: the fast path wrote other values than the original, which stand; it is off from here on. %s",
        PATCH.id,
        "; ".join(different),
    )
    return original
