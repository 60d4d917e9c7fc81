"""The input preparation of a decode step alone: position 24576 of 32768, room for 128 requests, block sizes 16 and 16.

Needs a CUDA or ROCm device: ``python -m ab_runs micro decode-input-prep --device cuda``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from ab_runs.gpu.v1_component import Decode, make_runner
from ab_runs.micro import Case, Work
from ab_runs.spec import SpecError

SETTINGS = Namespace(max_model_len=32768, max_num_seqs=128, max_num_tokens=4096, block_sizes=[16, 16], position=24576)


def cases(device: str) -> Iterable[Case]:
    """One request and eight, with one position row and with M-RoPE's three."""
    if device == "cpu":
        raise SpecError("decode-input-prep: its case needs a CUDA or ROCm device (--device cuda)")
    for requests in (1, 8):
        for mrope in (False, True):
            name = f"decode step of {requests} at {SETTINGS.position}" + (", M-RoPE" if mrope else "")
            yield Case(name, lambda requests=requests, mrope=mrope: _decode(device, requests, mrope))


def _decode(device: str, requests: int, mrope: bool) -> Work:
    import torch

    runner = make_runner(SETTINGS, device, mrope)
    decode = Decode(runner, requests, SETTINGS.position, SETTINGS.block_sizes)
    last: dict[str, Any] = {}

    def step() -> None:
        with torch.inference_mode():
            last["result"] = decode.step()

    def outputs() -> dict[str, Any]:
        """Every integer that the step left on the device and the host."""
        from patches._lib.v1_decode_shadow import snapshot

        found = snapshot(runner, last["result"])
        return {name: value for name, value in found.items() if hasattr(value, "shape")}

    return Work(step, outputs, prepare=decode.advance)
