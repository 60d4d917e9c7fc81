"""Shared experts on their side stream: no two accesses of one storage without an order between them."""

from __future__ import annotations

import types

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend


@pytest.fixture
def watched(world):
    """Notes every tensor operation's reads and writes, by storage, under the stream that runs it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch_npu import trace

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            read = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
            written = [a for a in torch.utils._pytree.tree_leaves(result) if isinstance(a, torch.Tensor)]
            known = {t.untyped_storage().data_ptr() for t in read}
            for tensor in read:
                kept.append(tensor)
                trace.access(tensor.untyped_storage().data_ptr(), False, str(func))
            for tensor in written:
                kept.append(tensor)  # no address is used twice
                inplace = func._schema.is_mutable
                if tensor.untyped_storage().data_ptr() not in known or inplace:
                    trace.access(tensor.untyped_storage().data_ptr(), True, str(func))
            return result

    kept: list[object] = []
    trace.clear()
    trace.on = True
    with Watch():
        yield trace
    trace.on = False
    trace.clear()


def _layer(monkeypatch, overlap, comm="MC2", all_reduce=lambda tensor: tensor * 2):
    """A real AscendFusedMoE with unquantised shared experts and what ``_forward_shared_experts`` reads."""
    import torch
    from vllm_ascend.ops.fused_moe import fused_moe_0_23_0 as module
    from vllm_ascend.quantization.quant_type import QuantType

    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(16, 16, generator=generator), torch.randn(8, 16, generator=generator)
    layer = object.__new__(module.AscendFusedMoE)
    torch.nn.Module.__init__(layer)
    layer.__dict__.update(
        multistream_overlap_shared_expert=overlap,
        quant_type=QuantType.NONE,
        _shared_experts=types.SimpleNamespace(gate_up_proj=object(), down_proj=object()),
        _shared_experts_part1=lambda rows: rows @ up.t(),
        _shared_experts_part2=lambda rows, gate_up: torch.nn.functional.silu(gate_up[:, :8]) * gate_up[:, 8:] @ down,
    )
    monkeypatch.setattr(module, "tensor_model_parallel_all_reduce", all_reduce)
    monkeypatch.setattr(module, "shared_expert_dp_enabled", lambda: False)
    context = types.SimpleNamespace(moe_comm_type=module.MoECommType[comm], flash_comm_v1_enabled=False, capturing=False)
    monkeypatch.setattr(module, "_EXTRA_CTX", context)
    import vllm_ascend.ascend_forward_context as forward_context

    monkeypatch.setattr(forward_context, "_EXTRA_CTX", context)
    return layer, module, context


def _forward(layer, module, forward=None):
    """A layer's way: hidden states made on the default stream, routed experts, shared experts, their sum."""
    import torch

    default = torch.npu.current_stream()
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)) + 0
    before_routed = default.record_event()
    before_dispatch = default.record_event()
    routed = hidden * 3
    before_combine = default.record_event()
    events = module.FusedMoEEvents(
        after_routed_experts=None,
        before_routed_experts=before_routed,
        before_dispatch=before_dispatch,
        before_gmm2=None,
        before_combine=before_combine,
    )
    shared = (forward or type(layer)._forward_shared_experts)(layer, hidden, events)
    return shared + routed


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_the_original_has_no_race(watched, monkeypatch, overlap):
    layer, module, _ = _layer(monkeypatch, overlap)
    _forward(layer, module)
    assert watched.races() == []


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
@pytest.mark.parametrize("comm", ["MC2", "ALLTOALL", "ALLGATHER", "FUSED_MC2"])
def test_the_patch_has_no_race_and_the_same_output(watched, monkeypatch, overlap, comm):
    import torch

    reduced_on = []

    def all_reduce(tensor):
        reduced_on.append(torch.npu.current_stream())
        return tensor * 2

    layer, module, _ = _layer(monkeypatch, overlap, comm, all_reduce)
    expected = _forward(layer, module)
    assert all(stream is torch.npu.default_stream() for stream in reduced_on)
    watched.clear()
    reduced_on.clear()
    with applied("ascend-shared-expert-stream"):
        found = _forward(layer, module)
    assert watched.races() == [] and found.equal(expected)
    on_side = [stream is not torch.npu.default_stream() for stream in reduced_on]
    assert on_side == ([] if comm == "ALLGATHER" else [overlap and comm in ("MC2", "ALLTOALL")])


def _published(module, side_computes):
    """The published order: the all-reduce always on the side stream, the computation only while nothing is captured."""
    import torch

    def forward(layer, hidden, events):
        side = module.shared_experts_calculation_stream()
        computing = torch.npu.stream(side) if side_computes else torch.npu.stream(None)
        with computing:
            if side_computes:
                torch.npu.current_stream().wait_event(events.before_routed_experts)
            shared = layer._shared_experts_part2(hidden, layer._shared_experts_part1(hidden))
        with torch.npu.stream(side):
            shared = module.tensor_model_parallel_all_reduce(shared)
        torch.npu.current_stream().wait_stream(side)
        return shared

    return forward


def test_the_checker_catches_the_published_order_while_capturing(watched, monkeypatch):
    layer, module, _ = _layer(monkeypatch, True)
    _forward(layer, module, _published(module, side_computes=True))
    assert watched.races() == []
    watched.clear()
    _forward(layer, module, _published(module, side_computes=False))
    assert len(watched.races()) >= 1


def test_dangerous_settings_keep_the_all_reduce_behind_the_join(world, monkeypatch):
    import vllm_ascend.ascend_config as ascend_config

    from patches.ascend import ascend_shared_expert_stream as patch

    layer, _, context = _layer(monkeypatch, True)
    with applied("ascend-shared-expert-stream"):
        assert patch.on_side_stream(layer)
        monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
        assert not patch.on_side_stream(layer)
        monkeypatch.delenv("HCCL_OP_EXPANSION_MODE")
        context.flash_comm_v1_enabled = True
        assert not patch.on_side_stream(layer)
        context.flash_comm_v1_enabled = False
        monkeypatch.setattr(ascend_config.get_ascend_config(), "enable_fused_mc2", 1)
        assert not patch.on_side_stream(layer)
    with applied("ascend-shared-expert-stream", allow_aiv=True):
        monkeypatch.setattr(ascend_config.get_ascend_config(), "enable_fused_mc2", 0)
        monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
        assert patch.on_side_stream(layer)


def _routed(monkeypatch):
    """A real ``fused_experts`` call (bf16, one rank) with the routed experts' operators left out."""
    import torch
    from vllm_ascend.ops.fused_moe import moe_comm_method as module

    method = object.__new__(module.AllGatherCommImpl)
    dispatched = types.SimpleNamespace(combine_metadata=None, group_list_type=1, group_list=None)
    method.token_dispatcher = types.SimpleNamespace(
        token_dispatch=lambda token_dispatch_input: dispatched,
        token_combine=lambda hidden_states, combine_metadata: hidden_states,
    )
    method.use_fusion_ops = False
    hidden = torch.ones(2, 4)
    monkeypatch.setattr(module, "build_token_dispatch_input", lambda **_: None)
    monkeypatch.setattr(module, "build_mlp_compute_input", lambda **_: None)
    monkeypatch.setattr(module, "unified_apply_mlp", lambda mlp_compute_input: (hidden * 2, None))
    monkeypatch.setattr(module, "_EXTRA_CTX", types.SimpleNamespace(moe_comm_method=method))
    given = types.SimpleNamespace(
        hidden_states=hidden, topk_ids=None, routing=types.SimpleNamespace(log2phy=None), swiglu_limit=0.0
    )
    return lambda: method.fused_experts(given)


def test_events_are_recorded_only_where_a_side_stream_waits(world, monkeypatch):
    import vllm_ascend.ascend_config as ascend_config
    from torch_npu import trace

    call = _routed(monkeypatch)

    def records():
        trace.clear()
        trace.on = True
        result = call()
        trace.on = False
        return trace.events["record"], result

    stock, expected = records()
    assert stock == 2 and expected.before_dispatch_evt is not None
    config = ascend_config.get_ascend_config()
    for overlap, keep, wanted in ((False, True, 0), (True, True, 2), (True, False, 0)):
        monkeypatch.setattr(config, "multistream_overlap_shared_expert", overlap)
        with applied("ascend-moe-events", keep_hints=keep):
            found, result = records()
        assert found == wanted
        assert result.routed_out.equal(expected.routed_out)
        assert (result.before_dispatch_evt is None) == (wanted == 0)


def test_without_hints_the_side_stream_still_waits_for_its_data(watched, monkeypatch):
    """The events that are left out order nothing that ``before_routed_experts`` does not."""
    layer, module, _ = _layer(monkeypatch, True)
    real = type(layer)._forward_shared_experts

    def without(self, hidden, events):
        events.before_dispatch = events.before_combine = None
        return real(self, hidden, events)

    _forward(layer, module, without)
    assert watched.races() == []
