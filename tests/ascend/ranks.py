"""Tensor-parallel ranks as threads of one process: each runs the real code, and gathers meet at a barrier.

One rank runs at a time (Triton's interpreter is not made for threads); it hands on while it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

_here = threading.local()


def run(monkeypatch: pytest.MonkeyPatch, ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """``function(rank)`` of every rank, in rank order; ``tensor_model_parallel_all_gather`` means what it means."""
    import torch
    import vllm.distributed as distributed
    import vllm.model_executor.layers.logits_processor as logits_processor
    from torch_npu._device import NpuIsCpu

    barrier, turn = threading.Barrier(ranks), threading.Lock()
    slots: list[Any] = [None] * ranks
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def all_gather(tensor: Any, dim: int = -1) -> Any:
        slots[_here.rank] = tensor
        meet()
        whole = torch.cat([slots[rank].clone() for rank in range(ranks)], dim=dim)
        meet()
        return whole

    def meet() -> None:
        turn.release()
        try:
            barrier.wait(timeout=60)
        finally:
            turn.acquire()

    with monkeypatch.context() as patch:
        for module in (distributed, logits_processor):
            patch.setattr(module, "tensor_model_parallel_all_gather", all_gather)
            patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)

        def work(rank: int) -> None:
            _here.rank = rank
            turn.acquire()
            try:
                with torch.inference_mode(), NpuIsCpu():
                    results[rank] = function(rank)
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                errors.append(error)
                barrier.abort()
            finally:
                turn.release()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    return results
