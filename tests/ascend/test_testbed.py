"""The testbed itself: the real modules import, the patch chain runs, and the stand-in never makes a value up."""

from __future__ import annotations

import importlib

import pytest

pytestmark = pytest.mark.ascend

MODULES = (
    "ascend_config",
    "ascend_forward_context",
    "compilation.compiler_interface",
    "ops.fused_moe.fused_moe_0_23_0",
    "ops.fused_moe.moe_comm_method",
    "ops.gdn",
    "ops.layernorm",
    "ops.rope_dsv4",
    "ops.rotary_embedding",
    "ops.vocab_parallel_embedding",
    "ops.weight_prefetch",
    "platform",
    "sample.rejection_sampler",
    "sample.sampler",
    "spec_decode.llm_base_proposer",
    "spec_decode.step3p5",
    "worker.block_table",
    "worker.model_runner_v1",
    "worker.npu_input_batch",
    "worker.utils",
    "worker.worker",
)


@pytest.mark.parametrize("name", MODULES)
def test_the_real_module_imports(world, name):
    module = importlib.import_module(f"vllm_ascend.{name}")
    assert "0.23.0" in module.__file__


def test_the_patch_chain_has_run(world):
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
    from vllm.v1.sample import rejection_sampler
    from vllm_ascend.ops.gdn import AscendGatedDeltaNetAttention

    assert QwenGatedDeltaNetAttention._forward_core is AscendGatedDeltaNetAttention._forward_core
    assert Qwen3NextAttention.forward.__module__ == "vllm_ascend.patch.worker.patch_qwen3_5"
    assert rejection_sampler.rejection_sample.__module__ == "vllm_ascend.sample.rejection_sampler"


def test_an_operator_without_a_cpu_meaning_raises(world):
    import torch_npu

    with pytest.raises(NotImplementedError, match="npu_moe_distribute_dispatch"):
        torch_npu.npu_moe_distribute_dispatch(1)


def test_a_delayed_copy_reads_its_source_at_the_synchronisation(world):
    import torch
    import torch_npu

    host, device = torch.tensor([1]), torch.tensor([0], device="npu")
    with torch_npu.copies.delay():
        device.copy_(host, non_blocking=True)
        assert device.item() == 0
        host.fill_(2)
    assert device.item() == 2


def test_the_race_checker_knows_events_from_their_absence(world):
    import torch
    from torch_npu import trace

    default, side = torch.npu.current_stream(), torch.npu.Stream()
    trace.clear()
    trace.on = True
    try:
        trace.access(1, True, "write")
        with torch.npu.stream(side):
            trace.access(1, False, "unordered read")
        assert len(trace.races()) == 1
        trace.clear()
        trace.access(1, True, "write")
        side.wait_stream(default)
        with torch.npu.stream(side):
            trace.access(1, False, "ordered read")
        default.wait_stream(side)
        trace.access(1, True, "write again")
        assert trace.races() == []
    finally:
        trace.on = False
        trace.clear()
