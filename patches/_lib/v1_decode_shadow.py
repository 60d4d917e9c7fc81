"""Every integer that a decode step's input preparation leaves behind, for the comparison with the original's."""

from __future__ import annotations

from typing import Any


def snapshot(runner: Any, result: Any) -> dict[str, Any]:
    """name -> copy of a buffer on the host (this waits for the device). Whole buffers, tails included.

    Left out: 0.18.1's host slot mapping, which nothing reads but the copy that the fast path replaces.
    """
    found: dict[str, Any] = {}
    both = (
        "input_ids",
        "query_start_loc",
        "discard_request_mask",
        "num_accepted_tokens",
        "req_indices",
        "query_pos",
        "num_scheduled_tokens",
        "prev_positions",
        "mrope_positions",
        "positions",
        "seq_lens",
    )
    for name in both:
        buffer = getattr(runner, name, None)
        if buffer is None:
            continue
        if hasattr(buffer, "gpu"):
            found[f"{name} on the device"] = buffer.gpu.cpu().clone()
            found[f"{name} on the host"] = buffer.cpu.clone()
        else:
            found[f"{name} on the device"] = buffer.cpu().clone()
    for name in ("num_computed_tokens", "optimistic_seq_lens_cpu"):
        if hasattr(runner, name):
            found[name] = getattr(runner, name).cpu().clone()
    for i, table in enumerate(runner.input_batch.block_table.block_tables):
        found[f"slot mapping of group {i}"] = table.slot_mapping.gpu.cpu().clone()
        found[f"block table of group {i}"] = table.block_table.gpu.cpu().clone()
    picked = result[0]
    if isinstance(picked, slice):  # the same rows by other means
        import torch

        picked = torch.arange(picked.start, picked.stop, dtype=torch.int32)
    found["logits indices"] = picked.cpu().clone()
    found["spec decode metadata"] = result[1]
    found["further values"] = tuple(result[2:])
    return found


def differences(mine: dict[str, Any], original: dict[str, Any]) -> list[str]:
    """One line for each buffer that differs: its name, the first place, both values. Empty where all are equal."""
    import torch

    found = []
    for name, theirs in original.items():
        ours = mine.get(name)
        if not isinstance(theirs, torch.Tensor):
            if ours != theirs:
                found.append(f"{name}: {ours} instead of {theirs}")
            continue
        if ours.dtype is not theirs.dtype or ours.shape != theirs.shape:
            found.append(f"{name}: {ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}")
            continue
        if not torch.equal(ours, theirs):
            at = (ours != theirs).flatten().nonzero()[0].item()
            found.append(f"{name}[{at}]: {ours.flatten()[at].item()} instead of {theirs.flatten()[at].item()}")
    return found
