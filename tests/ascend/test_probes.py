"""Operators that Python cannot make: found in an image that has them, and only then used."""

from __future__ import annotations

import functools
import types
from dataclasses import replace
from pathlib import Path

import pytest

from overlay.facts import Build, Facts, Hardware

WITHOUT = b"npu_recurrent_gated_delta_rule(Tensor query, Tensor key, *, Tensor? g=None) -> Tensor\0"
WITH = b"npu_recurrent_gated_delta_rule(Tensor query, Tensor key, *, Tensor? g=None, bool use_qk_l2norm=False) -> Tensor\0"


def _facts(root: Path, arch: str = "ascend910_93") -> Facts:
    (root / "vllm").mkdir(exist_ok=True)
    (root / "vllm_ascend").mkdir(exist_ok=True)
    return Facts(build=Build(root=str(root / "vllm")), hardware=Hardware(platform="ascend", arch=arch))


def test_the_norm_argument_is_found_in_the_operators_schema(tmp_path):
    from patches.ascend import ascend_norm_in_recurrent_kernel as patch

    facts = _facts(tmp_path)
    assert patch.operator_missing(facts) == "the build has no such operator"
    extension = tmp_path / "vllm_ascend" / "vllm_ascend_C.cpython-311-aarch64-linux-gnu.so"
    extension.write_bytes(b"\x7fELF\0" + WITHOUT)
    assert patch.operator_missing(facts) == "the build has no such operator"
    extension.write_bytes(b"\x7fELF\0" + WITHOUT + b"\0" + WITH)
    assert patch.operator_missing(facts) is None
    assert patch.operator_missing(replace(facts, build=Build(root="/no/such/place"))) == "the build has no such operator"
    assert patch.operator_missing(replace(facts, build=Build())) == "the build has no such operator"


def test_the_fused_operator_must_have_a_kernel_for_this_chip(tmp_path):
    from patches.ascend import ascend_fused_matmul_allreduce_norm as patch

    facts = _facts(tmp_path)
    assert patch.operator_missing(facts) == "the build has no such operator"
    base = tmp_path / "vllm_ascend/_cann_ops_custom/vendors/custom_transformer/op_impl/ai_core/tbe/kernel/config"
    for chip in ("ascend910b", "ascend910_93"):
        (base / chip).mkdir(parents=True)
        (base / chip / "matmul_allreduce_add_rmsnorm.json").write_text("{}")
        assert (patch.operator_missing(facts) is None) == (chip == "ascend910_93")
    assert patch.operator_missing(replace(facts, hardware=Hardware(platform="ascend"))) is not None
    assert list(patch.contribute(facts, {}).args) == ["additional_config.ascend_compilation_config.fuse_allreduce_rms"]


@pytest.mark.ascend
def test_vllm_ascends_own_pass_has_the_switch(world):
    from vllm_ascend.ascend_config import AscendCompilationConfig

    assert AscendCompilationConfig().fuse_allreduce_rms is False
    assert AscendCompilationConfig(fuse_allreduce_rms=True).fuse_allreduce_rms is True


@functools.cache
def _operator_with_norm():
    """An operator of that name in another namespace, which normalises by itself when told to."""
    import test_gdn
    import torch

    test_gdn._operators()
    library = torch.library.Library("overlay_probe", "FRAGMENT")
    library.define(
        "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, "
        "float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
        "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None, bool use_qk_l2norm=False) -> Tensor"
    )
    seen: list[bool] = []
    plain = torch.ops._C_ascend.npu_recurrent_gated_delta_rule

    def rule(query, key, value, state, use_qk_l2norm=False, **given):
        from vllm.model_executor.layers.fla.ops.l2norm import l2norm_fwd

        seen.append(use_qk_l2norm)
        if use_qk_l2norm:
            query, key = l2norm_fwd(query.contiguous()), l2norm_fwd(key.contiguous())
        return plain(query, key, value, state, **given)

    library.impl("npu_recurrent_gated_delta_rule", rule, "CPU")
    return library, seen


@pytest.mark.ascend
def test_an_operator_that_normalises_is_told_to_and_nobody_else_does(world, monkeypatch):
    import test_gdn
    import torch

    from patches.ascend import ascend_norm_in_recurrent_kernel as patch
    from tests.support import applied

    expected = test_gdn._decode(monkeypatch, 3)
    before = patch.count.get("refused: the loaded operator has no such argument")
    with applied("ascend-norm-in-recurrent-kernel"):  # the loaded operator has no argument: the norms stay
        assert test_gdn._decode(monkeypatch, 3).equal(expected)
    assert patch.count.get("refused: the loaded operator has no such argument") == before + 2

    _, seen = _operator_with_norm()
    seen.clear()
    loaded = types.SimpleNamespace(
        npu_causal_conv1d_custom=torch.ops._C_ascend.npu_causal_conv1d_custom,
        npu_recurrent_gated_delta_rule=torch.ops.overlay_probe.npu_recurrent_gated_delta_rule,
    )
    monkeypatch.setattr(torch.ops, "_C_ascend", loaded)
    hits = patch.count.get("hit")
    with applied("ascend-norm-in-recurrent-kernel"):
        found = test_gdn._decode(monkeypatch, 3)
    assert seen == [True] and patch.count.get("hit") == hits + 2
    assert found.equal(expected)
