"""Gated delta net: the same values with less moved."""

from __future__ import annotations

import functools
import types

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend

HEADS, VALUE_HEADS, WIDTH = 2, 4, 32


def _layer(**changed):
    """A real QwenGatedDeltaNetAttention with the attributes that the tested methods read."""
    import torch
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    layer = object.__new__(QwenGatedDeltaNetAttention)
    torch.nn.Module.__init__(layer)
    values = {
        "tp_size": 1,
        "key_dim": HEADS * WIDTH,
        "value_dim": VALUE_HEADS * WIDTH,
        "head_k_dim": WIDTH,
        "head_v_dim": WIDTH,
        "num_v_heads": VALUE_HEADS,
        "prefix": "layer",
        "activation": "silu",
        **changed,
    }
    for name, value in values.items():
        setattr(layer, name, value)
    return layer


def _packed(tokens, seed=0):
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, (2 * HEADS + VALUE_HEADS) * WIDTH, generator=generator).to(torch.bfloat16)


def test_one_token_is_split_as_views_with_the_originals_values_and_strides(world):
    layer = _layer()
    for tokens in (1, 2, 5):
        packed = _packed(tokens)
        expected = layer.rearrange_mixed_qkv(packed)
        with applied("ascend-gdn-qkv-views"):
            found = layer.rearrange_mixed_qkv(packed)
            assert layer.rearrange_mixed_qkv(None) == (None, None, None)
        for one, other in zip(expected, found, strict=True):
            assert other.equal(one) and other.shape == one.shape and other.stride() == one.stride()
        shared = found[0].untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
        assert shared == (tokens == 1)


def test_a_row_of_a_strided_buffer_is_left_to_the_original(world):
    layer = _layer()
    strided = _packed(1).t().contiguous().t().expand(1, -1)[:, :]
    wide = _packed(2).repeat(1, 2)[:1, ::2]
    with applied("ascend-gdn-qkv-views"):
        found = layer.rearrange_mixed_qkv(wide)
    for one, other in zip(layer.rearrange_mixed_qkv(wide), found, strict=True):
        assert other.equal(one) and other.is_contiguous()
    assert strided.shape == wide.shape


def test_the_conv_weights_transposed_view_is_contiguous_and_loading_writes_through(world):
    import torch

    from patches.ascend.ascend_gdn_conv_layout import lay_out

    weight = torch.nn.Parameter(torch.randn(12, 1, 4), requires_grad=False)
    before = weight.detach().clone()
    kept = weight.view(12, 4).transpose(0, 1)
    assert not kept.is_contiguous()
    assert lay_out(weight)
    view = weight.view(weight.size(0), weight.size(2)).transpose(0, 1)
    assert view.is_contiguous() and weight.equal(before) and weight.shape == before.shape
    weight.data.copy_(before + 1)  # a reload, through .data: no version counter tells
    assert view.equal((before + 1).view(12, 4).t())
    weight.data[3:5].copy_(before[3:5])  # a loader that fills a shard
    assert weight.view(12, 4).transpose(0, 1)[:, 3:5].equal(before[3:5].view(2, 4).t())
    address = weight.data_ptr()
    assert lay_out(weight) and weight.data_ptr() == address
    assert not lay_out(torch.nn.Parameter(torch.zeros(3, 4)))


def test_a_cache_by_address_would_go_stale(world):
    """The published form keeps a transposed copy under the weight's address."""
    import torch

    weight = torch.nn.Parameter(torch.ones(12, 1, 4), requires_grad=False)
    cache = {weight.data_ptr(): weight.view(12, 4).t().contiguous()}
    version = weight._version
    weight.data.copy_(torch.zeros(12, 1, 4))
    assert weight._version == version  # nothing shows the change
    assert not cache[weight.data_ptr()].equal(weight.view(12, 4).t())


def test_loading_a_model_lays_out_its_gdn_layers_and_its_drafts(world, monkeypatch):
    import torch
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    def gdn():
        layer = _layer()
        layer.conv1d = torch.nn.Conv1d(12, 12, 4, groups=12, bias=False)
        return layer

    runner = object.__new__(NPUModelRunner)
    other = torch.nn.Conv1d(12, 12, 4, groups=12, bias=False)

    def load_model(self):
        self.model = torch.nn.ModuleList([gdn(), other])
        self.drafter = types.SimpleNamespace(model=torch.nn.ModuleList([gdn()]))

    monkeypatch.setattr(NPUModelRunner, "load_model", load_model)
    with applied("ascend-gdn-conv-layout", accept_drift=True):
        runner.load_model()
    for layer in (runner.model[0], runner.drafter.model[0]):
        assert layer.conv1d.weight.view(12, 4).t().is_contiguous()
    assert not other.weight.view(12, 4).t().is_contiguous()


@functools.cache
def _operators():
    """The two custom operators of ``_forward_core``, with their names and schemas and a simple CPU meaning each."""
    import torch

    library = torch.library.Library("_C_ascend", "FRAGMENT")
    library.define(
        "npu_causal_conv1d_custom(Tensor(a!) output, Tensor x, Tensor weight, Tensor(b!)? conv_state=None, "
        "Tensor? bias_opt=None, Tensor? query_start_loc_opt=None, Tensor? cache_indices_opt=None, "
        "Tensor? initial_state_mode_opt=None, Tensor? num_accepted_tokens_opt=None, int activation_mode=0, "
        "int pad_slot_id=-1, int run_mode=0) -> ()"
    )
    library.define(
        "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, "
        "float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
        "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor"
    )

    def conv(output, x, weight, *_, **__):
        output.copy_(x * weight.sum(0))

    def rule(query, key, value, state, *, beta=None, scale=None, g=None, **_):
        mixed = (2 * query.float() + key.float() * key.float()).cumsum(-1).sum(-1, keepdim=True)
        mixed = mixed.repeat_interleave(VALUE_HEADS // HEADS, 1)
        return (value.float() * mixed * scale + beta.float()[..., None] + g.float()[..., None]).to(value.dtype)

    library.impl("npu_causal_conv1d_custom", conv, "CPU")
    library.impl("npu_recurrent_gated_delta_rule", rule, "CPU")
    return library


def _decode(monkeypatch, tokens):
    """The real ``_forward_core`` on a decode batch: [tokens, value heads, width]."""
    import torch
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
    from vllm_ascend.ops import gdn

    _operators()
    layer = _layer()
    layer.conv1d = torch.nn.Conv1d(_packed(1).shape[1], _packed(1).shape[1], 4, groups=_packed(1).shape[1], bias=False)
    layer.conv1d.weight.data = torch.linspace(-1, 1, layer.conv1d.weight.numel()).view_as(layer.conv1d.weight).bfloat16()
    layer.A_log, layer.dt_bias = torch.ones(VALUE_HEADS), torch.ones(VALUE_HEADS)
    layer.kv_cache = [torch.zeros(1), torch.zeros(8, VALUE_HEADS, WIDTH, WIDTH)]
    metadata = object.__new__(GDNAttentionMetadata)
    conv = types.SimpleNamespace(query_start_loc=None, cache_indices=None)
    decode = types.SimpleNamespace(causal_conv1d=conv, actual_seq_lengths=torch.ones(tokens, dtype=torch.int32))
    values = {
        "num_prefills": 0,
        "num_decodes": tokens,
        "num_decode_tokens": tokens,
        "num_actual_tokens": tokens,
        "non_spec_state_indices_tensor": torch.arange(tokens, dtype=torch.int32),
        "non_spec_decode_metadata": decode,
    }
    for name in (
        "spec_sequence_masks",
        "spec_token_indx",
        "non_spec_token_indx",
        "spec_state_indices_tensor",
    ):
        values[name] = None
    for name, value in values.items():
        object.__setattr__(metadata, name, value)
    monkeypatch.setattr(gdn, "get_forward_context", lambda: types.SimpleNamespace(attn_metadata={"layer": metadata}))
    gating = types.SimpleNamespace(
        fused_gdn_gating=lambda a_log, a, b, bias: (a.float().unsqueeze(0), b.sigmoid().unsqueeze(0))
    )
    monkeypatch.setattr(gdn, "DeviceOperator", gating)
    output = torch.zeros(tokens, VALUE_HEADS, WIDTH, dtype=torch.bfloat16)
    gates = torch.randn(2, tokens, VALUE_HEADS, generator=torch.Generator().manual_seed(1)).bfloat16()
    layer._forward_core(_packed(tokens, 4), gates[0], gates[1], output)
    return output


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_one_norm_launch_for_q_and_k_gives_the_same_output(world, monkeypatch, tokens):
    from overlay.runtime import Counters

    counts = Counters("ascend-gdn-joint-norm")
    expected = _decode(monkeypatch, tokens)
    before = counts.get("hit")
    with applied("ascend-gdn-joint-norm"):
        assert _decode(monkeypatch, tokens).equal(expected)
    assert counts.get("hit") == before + 1
    with applied("ascend-gdn-joint-norm"), applied("ascend-gdn-qkv-views"):
        assert _decode(monkeypatch, tokens).equal(expected)
    assert counts.get("hit") == before + 2
    assert expected.float().abs().sum() > 0


def test_parts_that_do_not_lie_side_by_side_are_normalised_one_by_one(world):
    import torch
    from vllm.model_executor.layers.fla.ops.l2norm import l2norm_fwd

    from patches.ascend.ascend_gdn_joint_norm import count, normalise

    buffer = torch.randn(5 * 192)
    first, second, third = (buffer[i * 192 : (i + 1) * 192].view(1, 3, 2, 32) for i in (0, 1, 3))
    for q, k, adjacent in (
        (first, second, True),
        (second, first, False),  # k before q
        (first, third, False),  # a gap
        (first, torch.randn(1, 3, 2, 32), False),  # another storage
        (first, second[..., :16], False),  # another width
    ):
        before = count.get("refused: q and k do not lie side by side")
        found = normalise(lambda rows: l2norm_fwd(rows.contiguous()), q, k)
        assert found[0].equal(l2norm_fwd(q)) and found[1].equal(l2norm_fwd(k.contiguous()))
        assert count.get("refused: q and k do not lie side by side") == before + (not adjacent)
