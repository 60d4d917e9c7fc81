"""Cosines and sines looked up together are those of two look-ups."""

from __future__ import annotations

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend


def test_buffers_and_slices_are_the_same(world, monkeypatch):
    import torch
    from vllm_ascend.ops import rotary_embedding as module
    from vllm_ascend.worker import model_runner_v1

    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(module, "_cos_sin_cache", torch.randn(64, 16, generator=generator).bfloat16())
    for name in ("_cos_slice", "_sin_slice"):
        monkeypatch.setattr(module, name, None)

    def play(update):
        monkeypatch.setattr(module, "_cos", torch.ones(1, 32, 1, 16, dtype=torch.bfloat16))
        monkeypatch.setattr(module, "_sin", torch.zeros(1, 32, 1, 16, dtype=torch.bfloat16))
        seen = []
        for tokens in (1, 5, 32, 3):
            update(torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(tokens)))
            seen += [t.clone() for t in (module._cos, module._sin, *module.get_cos_and_sin_slice())]
        return seen

    expected = play(module.update_cos_sin)
    with applied("ascend-cos-sin-once"):
        for update in (module.update_cos_sin, model_runner_v1.update_cos_sin):
            for one, other in zip(expected, play(update), strict=True):
                assert other.equal(one)


def test_without_buffers_nothing_happens(world, monkeypatch):
    import torch
    from vllm_ascend.ops import rotary_embedding as module

    from patches.ascend.ascend_cos_sin_once import count

    monkeypatch.setattr(module, "_cos", None)
    before = count.get("refused: no buffers for this model")
    with applied("ascend-cos-sin-once"):
        module.update_cos_sin(torch.arange(3))
    assert count.get("refused: no buffers for this model") == before + 1
