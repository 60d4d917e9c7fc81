"""A stand-in for ``torch_npu`` that runs on CPU tensors.

Everything here either means on the CPU what it means on an NPU, or raises NotImplementedError when it is called.
Nothing returns a made-up value. Importing it registers the device type ``npu`` (whose tensors are CPU tensors),
``torch.npu`` and, where the Triton interpreter is asked for, the extensions of triton-ascend.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from importlib import import_module

import torch

from torch_npu import _device, _ops
from torch_npu._ops import *  # noqa: F403 - torch_npu's operators live at its top
from torch_npu._streams import (
    Event,
    Stream,
    copies,
    current_stream,
    default_stream,
    set_stream,
    stream,
    synchronize,
    trace,
)
from torch_npu._synthetic import Missing, make_module, missing_getattr

__version__ = "2.10.0.post4+cpu.testbed"
__all__ = ["Event", "Stream", "copies", "trace", *_ops.__all__]

GIB = 1 << 30
MEMORY = (60 * GIB, 64 * GIB)  # free and total bytes of the pretended device


class _Properties:
    """The device that is pretended: an Atlas A2, for which the wheel on PyPI was built."""

    name = "Ascend910B1"
    total_memory = MEMORY[1]
    multi_processor_count = cube_core_num = 24
    vector_core_num = 48


npu = make_module(
    "torch_npu.npu",
    Event=Event,
    ExternalEvent=Event,
    NPUGraph=type("NPUGraph", (), {}),
    Stream=Stream,
    _is_in_bad_fork=lambda: False,
    config=types.SimpleNamespace(allow_internal_format=False),
    current_device=lambda: 0,
    current_stream=current_stream,
    default_stream=default_stream,
    device=lambda *_: contextlib.nullcontext(),
    device_count=lambda: 0,
    empty_cache=lambda: None,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    get_device_name=lambda *_: _Properties.name,
    get_device_properties=lambda *_: _Properties,
    get_rng_state=lambda *_: torch.get_rng_state(),
    get_soc_version=lambda: 220,
    graph=contextlib.nullcontext,
    graph_pool_handle=lambda: (0, 0),
    is_available=lambda: False,
    is_current_stream_capturing=lambda: False,
    manual_seed=lambda seed: None,
    manual_seed_all=lambda seed: None,
    mem_get_info=lambda *_: MEMORY,
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    memory_stats=lambda *_: {},
    max_memory_allocated=lambda *_: 0,
    reset_peak_memory_stats=lambda *_: None,
    set_compile_mode=lambda **_: None,
    set_device=lambda device: None,
    set_rng_state=lambda *_: None,
    set_stream=set_stream,
    stream=stream,
    synchronize=synchronize,
)
npu.memory = make_module(
    "torch_npu.npu.memory",
    MemPool=object,
    NPUPluggableAllocator=Missing("NPUPluggableAllocator"),
    use_mem_pool=contextlib.nullcontext,
)
npu.__getattr__ = missing_getattr("torch.npu")


class _ProcessGroupHCCL:
    class Options:
        def __init__(self) -> None:
            self.hccl_config: dict[str, object] = {}


_C = make_module(
    "torch_npu._C",
    _NPUTaskGroupHandle=type("_NPUTaskGroupHandle", (), {}),
    _weak_ref_tensor=lambda tensor: tensor,
)
_C._distributed_c10d = make_module("torch_npu._C._distributed_c10d", ProcessGroupHCCL=_ProcessGroupHCCL)
profiler = make_module("torch_npu.profiler")
profiler.__getattr__ = missing_getattr("torch_npu.profiler")
profiler.dynamic_profile = make_module("torch_npu.profiler.dynamic_profile", init=lambda *_: None, step=lambda: None)
op_plugin = make_module("torch_npu.op_plugin")
make_module("torch_npu.op_plugin.atb")
make_module("torch_npu.op_plugin.atb._atb_ops", _register_atb_extensions=lambda: None)
make_module("torch_npu._inductor")
Format = types.SimpleNamespace(FRACTAL_NZ=29, ND=2)
__getattr__ = missing_getattr("torch_npu")

_device.install(npu)
sys.modules["torch.npu"] = torch.npu = npu
if os.environ.get("TRITON_INTERPRET") == "1":
    import_module("torch_npu._triton").install()  # not from-import: the names above would answer it
