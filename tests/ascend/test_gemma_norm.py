"""1 + weight from a buffer: the same values, also after weights change."""

from __future__ import annotations

import types

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend

PATCH = "ascend-gemma-norm-weight"


@pytest.fixture
def norm(world, monkeypatch):
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_ascend.ops import layernorm

    monkeypatch.setattr(layernorm, "enable_custom_op", lambda: False)
    monkeypatch.setattr(layernorm, "DeviceOperator", types.SimpleNamespace(npu_gemma_rms_norm=_gemma))
    monkeypatch.setattr(torch.ops.vllm, "maybe_chunk_residual", lambda x, residual: residual, raising=False)
    with set_current_vllm_config(VllmConfig()):
        made = layernorm.AscendGemmaRMSNorm(16)
    made.weight.data = torch.randn(16, generator=torch.Generator().manual_seed(0)).bfloat16()
    return made


def _gemma(x, weight, eps):
    import torch_npu

    return torch_npu.npu_gemma_rms_norm(x, weight, eps)[0]


def _runner(model, drafter=None):
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    runner = object.__new__(NPUModelRunner)
    runner.__dict__.update(model=model, drafter=types.SimpleNamespace(model=drafter))
    return runner


def _output(norm):
    import torch

    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    return norm.forward_oot(x, x * 2)


def _equal(one, other):
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_the_norm_reads_the_buffer_and_gives_the_same(norm):
    import torch

    from patches.ascend import ascend_gemma_norm_weight as patch

    expected = _output(norm)
    model = torch.nn.ModuleList([norm])
    with applied(PATCH):
        assert _equal(_output(norm), expected)  # before loading: no buffer yet
        assert patch.refresh(model) == 1
        assert norm.overlay_one_plus_weight.equal(1.0 + norm.weight)
        assert "overlay_one_plus_weight" not in model.state_dict()
        assert _equal(_output(norm), expected)
        norm.overlay_one_plus_weight += 1
        assert not _equal(_output(norm), expected)  # it is what the norm reads


@pytest.mark.parametrize("call", ["load_model", "reload_weights", "update_weights", "finish_weight_update", "wake_up"])
def test_everything_that_changes_weights_makes_the_buffer_anew(norm, monkeypatch, call):
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
    from vllm_ascend.worker.worker import NPUWorker

    def change(self, *_, **__):
        norm.weight.data.copy_(norm.weight.data + 1)

    owner = {"load_model": NPUModelRunner, "reload_weights": GPUModelRunner}.get(call, NPUWorker)
    monkeypatch.setattr(owner, call, change)
    runner = _runner(torch.nn.ModuleList([]), torch.nn.ModuleList([norm]))
    worker = object.__new__(NPUWorker)
    worker.__dict__["model_runner"] = runner
    with applied(PATCH, accept_drift=True):
        getattr(runner, "load_model" if call != "reload_weights" else call)() if owner is not NPUWorker else getattr(
            worker, call
        )()
        address = norm.overlay_one_plus_weight.data_ptr()
        assert norm.overlay_one_plus_weight.equal(1.0 + norm.weight)
        (getattr(runner, call) if owner is not NPUWorker else getattr(worker, call))()
        assert norm.overlay_one_plus_weight.equal(1.0 + norm.weight)
        assert norm.overlay_one_plus_weight.data_ptr() == address  # captured graphs read it there
        expected = _output(norm)
    assert _equal(_output(norm), expected)


def test_waking_the_kv_cache_alone_touches_no_weight(norm, monkeypatch):
    import torch
    from vllm_ascend.worker.worker import NPUWorker

    def wake_up(self, tags=None):
        pass

    monkeypatch.setattr(NPUWorker, "wake_up", wake_up)
    worker = object.__new__(NPUWorker)
    worker.__dict__["model_runner"] = _runner(torch.nn.ModuleList([norm]))
    with applied(PATCH, accept_drift=True):
        worker.wake_up(["kv_cache"])
        assert not hasattr(norm, "overlay_one_plus_weight")
        worker.wake_up(tags=["weights"])
        assert hasattr(norm, "overlay_one_plus_weight")


def test_a_cache_by_identity_would_go_stale(norm):
    import torch

    cache = {id(norm): 1.0 + norm.weight}
    norm.weight.data.copy_(torch.zeros(16))
    assert not cache[id(norm)].equal(1.0 + norm.weight)


def test_attention_reads_the_buffers_of_its_two_norms(norm, monkeypatch):
    import torch
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

    from patches.ascend import ascend_gemma_norm_weight as patch

    seen = []

    def split(**given):
        seen.append((given["q_weight"].clone(), given["k_weight"].clone()))
        raise StopIteration

    monkeypatch.setattr(torch.ops.vllm, "triton_split_qkv_rmsnorm_mrope", split, raising=False)
    rotary = types.SimpleNamespace(
        cos_sin_cache=torch.zeros(8, 4), mrope_section=[1, 1, 1], mrope_interleaved=False, rotary_dim=4
    )
    attention = object.__new__(Qwen3NextAttention)
    torch.nn.Module.__init__(attention)
    attention.__dict__.update(
        qkv_proj=lambda rows: (rows, None),
        config=types.SimpleNamespace(model_type="qwen3_5_moe", rms_norm_eps=1e-6),
        rotary_emb=rotary,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        attn_output_gate=True,
    )
    attention.q_norm = attention.k_norm = norm

    def run():
        with pytest.raises(StopIteration):
            attention(torch.arange(3), torch.empty(3, 4), torch.zeros(3, 4))

    run()
    with applied(PATCH):
        run()
        patch.refresh(attention)
        run()
        norm.overlay_one_plus_weight += 1
        run()
    assert _equal(seen[0], seen[1]) and _equal(seen[0], seen[2]) and not _equal(seen[0], seen[3])
