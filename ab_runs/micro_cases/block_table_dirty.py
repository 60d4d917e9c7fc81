"""Decode steps of a V1 block table: a block is appended once per ``BLOCK`` tokens of a request, committed every step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from ab_runs.micro import Case, Work

BLOCK = 16


def cases(device: str) -> Iterable[Case]:
    """Batches of 1 and 8 at 32k tokens of context, one and two KV cache groups."""
    for requests, groups in ((1, 1), (8, 1), (8, 2)):
        name = f"decode, {requests} requests of 32k, {groups} group{'s' if groups > 1 else ''}"
        yield Case(name, lambda requests=requests, groups=groups: _decode(device, requests, 32768, groups))


def table(device: str, requests: int, context: int, groups: int) -> Any:
    """The build's own ``MultiGroupBlockTable``; its signature differs between releases, its meaning does not."""
    import torch
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    blocks = 2 * context // BLOCK
    given = {
        "max_num_reqs": 16,
        "max_model_len": 2 * context,
        "max_num_batched_tokens": 2048,
        "pin_memory": device != "cpu",
        "device": torch.device(device),
        "block_sizes": [BLOCK] * groups,
        "kernel_block_sizes": [BLOCK] * groups,
        "max_num_blocks": [blocks] * groups,
    }
    known = inspect.signature(MultiGroupBlockTable.__init__).parameters
    return MultiGroupBlockTable(**{name: value for name, value in given.items() if name in known})


def _decode(device: str, requests: int, context: int, groups: int) -> Work:
    made = table(device, requests, context, groups)
    blocks = context // BLOCK
    for row in range(requests):
        # Requests stand at different places in their blocks, as in a service.
        made.add_row(tuple(list(range(1 + row * blocks, 1 + (row + 1) * blocks)) for _ in range(groups)), row)
    state = {"step": 0, "block": 1 + requests * blocks}

    def step() -> None:
        state["step"] += 1
        for row in range(requests):
            if (state["step"] + 5 * row) % BLOCK == 0 and _room(made, row):
                state["block"] += 1
                made.append_row(tuple([state["block"]] for _ in range(groups)), row)
        made.commit_block_table(requests)

    def outputs() -> dict[str, Any]:
        """What attention would read of each group: the device rows of the batch."""
        return {f"group {i}": made[i].get_device_tensor(requests) for i in range(groups)}

    return Work(step, outputs)


def _room(made: Any, row: int) -> bool:
    """A long timing run must not grow a row beyond its end; it then measures steps without an append."""
    first = made[0]
    return bool(first.num_blocks_per_row[row] < first.max_num_blocks_per_req - 1)
