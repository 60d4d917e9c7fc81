"""The device type ``npu``, whose tensors are CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_npu._streams import copies


def _on_cpu(device: Any) -> Any:
    if isinstance(device, str) and device.partition(":")[0] == "npu":
        return "cpu"
    if isinstance(device, torch.device) and device.type == "npu":
        return torch.device("cpu")
    return device


class NpuIsCpu(TorchFunctionMode):
    """Turns ``npu`` into ``cpu`` in every call, and pinned memory (which a CPU build has none of) into plain memory.

    ``Tensor.pin_memory`` of unpinned memory copies, as it does on a real device.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.pin_memory:
            return args[0].clone()
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(arg) for arg in args)
        if func is torch.Tensor.copy_ and copies.delayed:
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if non_blocking:
                target, source = args[0], args[1]
                copies.queue.append(lambda: target.data.copy_(source))
                return target
        return func(*args, **kwargs)


def install(npu: Any) -> None:
    """Register the device type and its module; leave the mode on for the life of the process."""
    if getattr(torch, "_npu_is_cpu", False):
        return
    torch._npu_is_cpu = True
    with contextlib.suppress(RuntimeError):
        torch.utils.rename_privateuse1_backend("npu")
    torch.Tensor.npu = lambda self, *_, **__: self
    torch.version.cann = None
    torch.distributed.is_hccl_available = lambda: True
    NpuIsCpu().__enter__()
