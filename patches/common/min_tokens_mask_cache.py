"""Keep the device index tensors of the min-tokens mask under speculative decoding.

While a request is below its ``min_tokens``, ``MinTokensLogitsProcessor.apply_with_spec_decode`` builds the rows and
stop tokens to mask in NumPy and copies both to the device, every step. They depend on nothing but the draft lengths
and, per request, its index, how many of its rows to mask and its stop ids. That content is the key here, so an entry is
right whenever it is found, whatever happened to the batch in between.
"""

from __future__ import annotations

from typing import Any

from overlay.runtime import Counters
from overlay.spec import Check, Condition, Exactness, Kind, Patch, Target
from patches._lib.v1_fingerprints import seen

PATCH = Patch(
    id="min-tokens-mask-cache",
    kind=Kind.CODE,
    summary="Keep the min-tokens mask's device indices under a key made of their content (V1, speculation)",
    why=(
        "Every step with a request below min_tokens rebuilds the mask in NumPy and makes two copies to the device; up "
        "to 0.23.0 both come from pageable memory and wait for the device."
    ),
    remove_when="apply_with_spec_decode stops rebuilding its indices each step, or the V1 runner is gone",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at="vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.apply_with_spec_decode",
            use="apply_with_spec_decode",
            fingerprints=seen("81564b885bdd5eb3 = 542158b7663063cb = dd21edeb42e0ecf8 ="),
        ),
    ),
    # update_state and add_request fix the layout of min_toks, which the key is read from.
    assumes=(
        Target(
            at="vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.add_request",
            fingerprints=seen("96fb1968e2cb2053 = = = 72402e7d4a0e3114 ="),
        ),
        Target(
            at="vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.__init__",
            fingerprints=seen("59d6a2127def4802 = cb53d48a4d34da7b = 05d30c487272946f ="),
        ),
    ),
    condition=Condition(
        vllm=">=0.18.1,<0.34",
        runner="V1",
        platforms=("cuda", "rocm", "dcu", "cpu", "ascend"),
        facts={"serving.speculative_method": Check("speculation on", bool)},
    ),
    tests="tests/v1/test_min_tokens_mask_cache.py",
    measured="ab_runs/results/host/h200_exactness.yaml",
)

count = Counters(PATCH.id)

ENTRIES = 32  # masks kept per processor: drafts of varying length alternate between few of them


def _on_device(array: Any, device: Any) -> Any:
    """``array`` (int64) as a tensor on ``device``, through pinned memory where the platform has it."""
    import torch
    from vllm.utils.platform_utils import is_pin_memory_available

    tensor = torch.from_numpy(array)
    if torch.device(device).type != "cpu" and is_pin_memory_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _build(num_draft_tokens: Any, masked: Any, device: Any) -> Any:
    """(rows, token ids), both int64 and on the device, one pair per row and stop id to mask."""
    import numpy as np

    start = np.concatenate([[0], np.cumsum(np.asarray(num_draft_tokens, dtype=np.int64))])
    rows, toks = [], []
    for request, rows_to_mask, stop_ids in masked:
        first = start[request]
        rows.append(np.repeat(np.arange(first, first + rows_to_mask, dtype=np.int64), len(stop_ids)))
        toks.append(np.tile(np.asarray(stop_ids, dtype=np.int64), rows_to_mask))
    return _on_device(np.concatenate(rows), device), _on_device(np.concatenate(toks), device)


def apply_with_spec_decode(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Mask stop tokens in the first rows of each request that is below its min_tokens.

    logits: [sum of draft lengths, vocabulary], changed in place and returned. num_draft_tokens: draft length per
    request, in batch order.
    """
    logits = args[0] if args else kwargs["logits"]
    num_draft_tokens = args[1] if len(args) > 1 else kwargs["num_draft_tokens"]
    entries = instance.min_toks
    if not entries:
        return logits
    masked = []
    for request, entry in entries.items():
        if len(entry) > 3 and entry[3]:
            count.refuse("structured outputs")
            return wrapped(*args, **kwargs)
        if not entry[2]:
            continue
        if not 0 <= request < len(num_draft_tokens):
            count.refuse("request outside the batch")
            return wrapped(*args, **kwargs)
        rows_to_mask = min(entry[0] - len(entry[1]), num_draft_tokens[request])
        if rows_to_mask > 0:
            masked.append((request, rows_to_mask, tuple(entry[2])))
    if not masked:
        count.hit()
        return logits
    key = (tuple(num_draft_tokens), tuple(masked))
    cache = instance.__dict__.setdefault("_overlay_masks", {})
    indices = cache.get(key)
    if indices is None:
        count.add("built")
        if len(cache) >= ENTRIES:
            del cache[next(iter(cache))]
        indices = cache[key] = _build(num_draft_tokens, masked, instance.device)
    else:
        count.hit()
    logits.index_put_(indices, instance.neg_inf_tensor)
    return logits
