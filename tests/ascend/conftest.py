"""Tests marked ``ascend`` run the real vllm-ascend 0.23.0 on CPU tensors, in the environment that
``tests/testbeds/make_ascend_env.sh`` makes:

    $(tests/testbeds/make_ascend_env.sh) -m pytest tests/ascend

In any other environment they are left out. What must be settled before the first import is settled here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

TESTBED = importlib.util.find_spec("torch_npu") is not None and importlib.util.find_spec("vllm_ascend") is not None
if TESTBED:
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",  # with the interpreter on, vLLM then keeps Triton although there is no driver
        OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1",  # functions compiled by decorators run as they are
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        TRITON_INTERPRET="1",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_PLUGINS="ascend",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if TESTBED:
        return
    skip = pytest.mark.skip(reason="needs the environment of tests/testbeds/make_ascend_env.sh")
    for item in items:
        if "ascend" in item.keywords and item.get_closest_marker("ascend"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def world():
    """The real vllm-ascend, imported in the order that it needs, its whole patch chain run."""
    if not TESTBED:
        pytest.skip("needs the environment of tests/testbeds/make_ascend_env.sh")
    import ascend_world

    return ascend_world.load()
