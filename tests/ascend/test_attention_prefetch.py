"""Prefetching forks and joins, hints at the next layer's weights, and changes no value."""

from __future__ import annotations

import types

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend


def test_the_moe_of_a_layer_hints_at_the_attention_of_the_next(world, monkeypatch):
    import torch
    import torch_npu
    from torch_npu import trace
    from vllm_ascend.ops.fused_moe.fused_moe_0_23_0 import AscendFusedMoE
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    def moe():
        module = object.__new__(AscendFusedMoE)
        torch.nn.Module.__init__(module)
        return module

    def layer():
        attention = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(4, 8), "o_proj": torch.nn.Linear(8, 4)})
        return torch.nn.ModuleDict({"self_attn": attention, "mlp": torch.nn.ModuleDict({"experts": moe()})})

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer(), layer()])})
    runner = object.__new__(NPUModelRunner)
    hinted = []
    monkeypatch.setattr(
        torch_npu, "npu_prefetch", lambda weight, *rest: hinted.append((weight, torch.npu.current_stream(), rest[1]))
    )

    def load_model(self):
        self.model = model

    def shared_forward_impl(self, hidden_states, router_logits):
        return hidden_states * 2

    monkeypatch.setattr(NPUModelRunner, "load_model", load_model)
    monkeypatch.setattr(AscendFusedMoE, "shared_forward_impl", shared_forward_impl)
    first, last = (model["layers"][i]["mlp"]["experts"] for i in (0, 1))
    hidden = torch.ones(2, 4)
    with applied("ascend-attention-prefetch", accept_drift=True, max_bytes=40):
        runner.load_model()
        trace.clear()
        trace.on = True
        assert first.shared_forward_impl(hidden, None).equal(hidden * 2)
        trace.on = False
        assert trace.events["wait_stream"] == 2  # fork and join
        assert last.shared_forward_impl(hidden, None).equal(hidden * 2)
    following = model["layers"][1]["self_attn"]
    assert [weight for weight, _, _ in hinted] == [following["qkv_proj"].weight, following["o_proj"].weight]
    assert all(stream is not torch.npu.default_stream() and size == 40 for _, stream, size in hinted)


def test_a_failing_layer_joins_all_the_same(world):
    import torch
    from torch_npu import trace

    from patches.ascend import ascend_attention_prefetch as patch

    def broken(*_, **__):
        raise ValueError

    layer = types.SimpleNamespace(_overlay_next_attention=[torch.nn.Linear(2, 2)])
    trace.clear()
    trace.on = True
    with pytest.raises(ValueError):
        patch.moe(broken, layer, (torch.ones(1, 2), None), {})
    trace.on = False
    assert trace.events["wait_stream"] == 2
