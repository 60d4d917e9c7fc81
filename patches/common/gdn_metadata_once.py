"""Build the gated delta net's attention metadata once a step for all its KV cache groups.

Qwen3-Next and Qwen3.5 have several KV cache groups of GDN layers. Up to vLLM 0.30 the V1 runner calls the full ``build`` for
each of them although they differ in nothing but the block table: everything else in the metadata is a function of the
batch. Here the first build of a step (the leader's) is the original; the others take its metadata and gather only their
own state indices.

Full CUDA graphs make this delicate, because a graph reads the buffers of the builder that was captured. So a follower may
take the leader's buffers in a step that may replay a graph only if its captures took the leader's buffers too, all of
them from this same leader; where a capture was its own, so are its steps. The leader fills its buffers each step either
way. Batches with speculation are left to the original.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Condition, Exactness, Kind, Patch, Target
from patches._lib.v1_fingerprints import own_runner, seen  # noqa: F401 - own_runner is named in the condition

PATCH = Patch(
    id="gdn-metadata-once",
    kind=Kind.CODE,
    summary="Build GDN attention metadata once a step for all KV cache groups (V1, Qwen3-Next and Qwen3.5)",
    why="Each GDN group's build makes 6 to 10 small device operations and the host work for them, for equal results.",
    remove_when="V1 shares GDN metadata between groups, or V1 is gone",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
            "build",
            fingerprints=seen("a71b627d2a1bd2cf 1a236cf200eea9e2 cbcdbe16eda368a9 945a7ceb5c97f59a"),
        ),
        Target(
            "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build_for_cudagraph_capture",
            "capture",
            fingerprints=seen("7986aa75cd6ac0a8 = = ="),
        ),
    ),
    assumes=(
        Target(
            "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.__init__",
            fingerprints=seen("e969c1375b3f8349 1dd6d216616cd7e8 = 35ea5cd6acfa2e5a"),
        ),
        Target(
            "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata",
            fingerprints=seen("e9e8ae823e02206e f8cc5d6f7a2deda9 = ="),
        ),
        Target(
            "vllm.v1.attention.backends.utils:mamba_get_block_table_tensor",
            fingerprints=seen("4a79ca32bb457204 = dde29bb957394a0d ="),
        ),
        Target(
            "vllm.v1.attention.backends.utils:split_decodes_and_prefills",
            fingerprints=seen("050d21ebedcadc8f 1dc566575a03b2b1 d4b45e415fcd1984 ="),
        ),
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
            fingerprints=seen("4c5f02fbdb77311f 0ff40dfa632a95e9 9b9c8122ebf41030 47eb60d6576e1385"),
        ),
    ),
    condition=Condition(
        vllm=">=0.18.1,<0.31",
        runner="V1",
        platforms=("cuda", "rocm", "dcu"),
        architectures=(
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        also="own_runner",
    ),
    tests="tests/v1/test_gdn_metadata_once.py",
    measured="ab_runs/results/host/h200_exactness.yaml",
)

count = Counters(PATCH.id)

# Fields of the common metadata that belong to one group, or are caches of what the others say.
_OF_A_GROUP = {
    "block_table_tensor",
    "slot_mapping",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "_seq_lens_cpu",
    "_num_computed_tokens_cpu",
    "_num_computed_tokens_cache",
}


class _Leader:
    """The step's first build. common: its common metadata. written: version counters of what it was built from."""

    __slots__ = ("builder", "common", "metadata", "prefix", "written")

    def __init__(self, builder: Any, common: Any, metadata: Any, prefix: int) -> None:
        self.builder, self.common, self.metadata, self.prefix = builder, common, metadata, prefix
        self.written = _written(common)


_leader: _Leader | None = None


def _written(common: Any) -> tuple[int, ...] | None:
    tensors = (common.query_start_loc, common.query_start_loc_cpu, common.seq_lens)
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return tuple(tensor._version for tensor in tensors)


def _same_step(leader: _Leader, common: Any, prefix: int) -> bool:
    """Whether ``common`` says the same of the batch: the very same tensors, unwritten since, and equal numbers."""
    if prefix != leader.prefix or leader.written is None or leader.written != _written(common):
        return False
    theirs = vars(leader.common)
    for name, value in vars(common).items():
        if name in _OF_A_GROUP or value is theirs.get(name):
            continue
        if not isinstance(value, (int, bool)) or value != theirs.get(name):
            return False
    return True


def _same_builder(leader: Any, follower: Any) -> bool:
    return (
        type(leader) is type(follower)
        and leader.kv_cache_spec == follower.kv_cache_spec
        and leader.vllm_config is follower.vllm_config
        and getattr(leader, "gdn_prefill_backend", None) == getattr(follower, "gdn_prefill_backend", None)
        and leader.use_full_cuda_graph == follower.use_full_cuda_graph
        and leader.decode_cudagraph_max_bs == follower.decode_cudagraph_max_bs
    )


def _graph_path(builder: Any, metadata: Any) -> bool:
    """Whether the metadata lies in the builder's own buffers, which a captured graph may read."""
    return bool(
        builder.use_full_cuda_graph
        and metadata.num_prefills == 0
        and metadata.num_spec_decodes == 0
        and metadata.num_decodes <= builder.decode_cudagraph_max_bs
    )


def build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``build(common_prefix_len, common_attn_metadata, ...)``: the leader's metadata with this group's state indices."""
    global _leader
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    if type(instance) is not GDNAttentionMetadataBuilder:
        count.refuse("another builder")
        return wrapped(*args, **kwargs)
    if instance.use_spec_decode:
        count.refuse("speculation")
        return wrapped(*args, **kwargs)
    prefix = args[0] if args else kwargs["common_prefix_len"]
    common = args[1] if len(args) > 1 else kwargs["common_attn_metadata"]
    leader = _leader
    capturing = "_overlay_capturing" in instance.__dict__
    taken = instance.__dict__.get("_overlay_captured")  # whose buffers this builder's graphs read; None: no graph yet
    follows = (
        leader is not None
        and leader.builder is not instance
        and _same_builder(leader.builder, instance)
        and _same_step(leader, common, prefix)
    )
    if not follows:
        count.add("led")
    elif capturing and taken in (None, leader.builder):
        instance._overlay_captured = leader.builder
        count.hit()
        return _followed(instance, leader.metadata, common)
    elif not capturing and (taken is leader.builder or not _graph_path(instance, leader.metadata)):
        count.hit()
        return _followed(instance, leader.metadata, common)
    else:
        count.refuse("captured with its own buffers")
    if capturing:
        instance._overlay_captured = instance
    metadata = wrapped(*args, **kwargs)
    if not follows:
        _leader = _Leader(instance, common, metadata, prefix)
    return metadata


def _followed(builder: Any, first: Any, common: Any) -> Any:
    """``first`` with the state indices of ``builder``'s group, as ``build`` gathers them without speculation."""
    import copy

    from vllm.v1.attention.backends import gdn_attn

    metadata = copy.copy(first)
    table = gdn_attn.mamba_get_block_table_tensor(
        common.block_table_tensor,
        common.seq_lens,
        builder.kv_cache_spec,
        builder.vllm_config.cache_config.mamba_cache_mode,
    )
    state = table[:, 0]
    if first.num_prefills > 0 and hasattr(first, "prefill_state_indices"):
        metadata.prefill_state_indices = state[first.num_decodes :] if first.num_decodes > 0 else state
    if _graph_path(builder, first):
        rows = first.non_spec_state_indices_tensor.shape[0]
        decodes = first.num_decodes
        builder.non_spec_state_indices_tensor[:decodes].copy_(state, non_blocking=True)
        state = builder.non_spec_state_indices_tensor[:rows]
        padding = gdn_attn.NULL_BLOCK_ID if hasattr(gdn_attn, "NULL_BLOCK_ID") else gdn_attn.PAD_SLOT_ID
        state[decodes:].fill_(padding)
    metadata.non_spec_state_indices_tensor = state
    return metadata


def capture(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``build_for_cudagraph_capture``: note that the graph will keep the buffers of what is built now."""
    instance._overlay_capturing = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        del instance._overlay_capturing
