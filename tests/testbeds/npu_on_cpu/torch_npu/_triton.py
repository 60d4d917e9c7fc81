"""The triton-ascend extensions that vllm-ascend's kernels use, for the Triton interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_npu._synthetic import Missing, make_module


@triton.jit
def get_element(values, offsets):
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == offsets[0], values, 0))


def install() -> None:
    make_module("triton.language.extra.cann")
    make_module(
        "triton.language.extra.cann.extension",
        get_element=get_element,
        insert_slice=Missing("insert_slice"),
        extract_slice=Missing("extract_slice"),
    )
