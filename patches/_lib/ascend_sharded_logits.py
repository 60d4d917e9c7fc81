"""Logits of which each tensor-parallel rank holds its own part of the vocabulary, not gathered yet.

A consumer that knows the type asks for the largest token of each row: every rank finds its own, and only (value, index)
pairs are gathered. Any other use gathers first, through the original code, and goes on with the ordinary tensor. All
ranks run the same code on the same batch, so all of them take the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

LARGEST_EXACT_ID = 2**24  # token ids travel as fp32 beside their values


def head_refusal(processor: Any, lm_head: Any) -> str | None:
    """Why this head's logits must be gathered as a whole; None where shards suffice."""
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm_ascend.utils import lmhead_tp_enable

    shard = getattr(lm_head, "shard_indices", None)
    if get_tensor_model_parallel_world_size() == 1:
        return "one rank"
    if lmhead_tp_enable():
        return "lm_head has a tensor-parallel group of its own"
    if processor.logits_as_input or not processor.use_all_gather:
        return "logits are not gathered to every rank"
    if processor.scale <= 0:
        return "a scale that is not positive"
    if shard is None or shard.added_vocab_end_index > shard.added_vocab_start_index or shard.num_added_elements_padded:
        return "an added vocabulary"
    if processor.org_vocab_size >= LARGEST_EXACT_ID:
        return "a vocabulary beyond exact fp32 integers"
    return None


class ShardedLogits:
    """[rows, vocabulary / ranks] on this rank, as ``lm_head`` gave them: before soft cap and scale.

    gather: the original ``LogitsProcessor.forward``, which makes the full logits of a given shard.
    """

    def __init__(self, processor: Any, lm_head: Any, shard: Any, gather: Callable[[Any], Any]) -> None:
        self._processor, self._lm_head, self._shard, self._gather = processor, lm_head, shard, gather
        self._full: Any = None

    def full(self) -> Any:
        """The ordinary logits [rows, vocabulary], as the original makes them."""
        if self._full is None:
            self._full = self._gather(self._shard)
        return self._full

    @property
    def first_token(self) -> int:
        """The first token id of this rank's part."""
        return self._lm_head.shard_indices.org_vocab_start_index

    @property
    def last_token(self) -> int:
        """The token id behind this rank's part, padding left out."""
        return self._lm_head.shard_indices.org_vocab_end_index

    def part(self, rows: Any = None, *, clean: bool = False, wide: bool = False, own: bool = False) -> Any:
        """This rank's logits of ``rows`` (an index tensor; None: all), soft cap and scale applied, padding at -inf.

        clean: NaN becomes 0, as the rejection sampler does it with target rows. Infinities, which it makes finite, may
        stay in half precision, whose finite values all lie between. wide: as it does it, in fp32 and finite: needed
        where tokens are masked with -inf afterwards. own: the caller will write to it. Cap and scale are applied in the
        logits' own precision before the comparison: rounding makes ties that must fall as they fall in the original.
        """
        import torch

        logits = self._shard if rows is None else self._shard[rows]
        cap, scale = self._processor.soft_cap, self._processor.scale
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if scale != 1.0:
            logits = logits * scale
        if clean and (wide or logits.dtype == torch.float32):
            limits = torch.finfo(torch.float32)
            logits = torch.nan_to_num(logits.to(torch.float32), nan=0.0, posinf=limits.max, neginf=limits.min)
        elif clean:
            logits = torch.nan_to_num(logits, nan=0.0, posinf=float("inf"), neginf=float("-inf"))
        used = self.last_token - self.first_token
        if logits is self._shard and (own or used < logits.shape[-1]):
            logits = logits.clone()
        if used < logits.shape[-1]:
            logits[..., used:] = float("-inf")
        return logits

    def best(self, *parts: Any) -> Any:
        """Token ids (int64) of the largest logit of every row of ``parts``, which all ranks pass alike; one gather.

        On ties the lowest id wins: argmax takes the first in a part, and the first part in rank order.
        """
        import torch
        from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

        pairs = []
        for part in parts:
            local = part.argmax(dim=-1, keepdim=True)
            value = part.gather(-1, local)
            pairs.append(torch.cat([value.float(), (local + self.first_token).float()], dim=-1))
        pair = torch.cat(pairs) if len(pairs) > 1 else pairs[0]
        ranks = get_tensor_model_parallel_world_size()
        gathered = tensor_model_parallel_all_gather(pair, dim=-1).view(-1, ranks, 2)
        winner = gathered[..., 0].argmax(dim=-1, keepdim=True)
        return gathered[..., 1].gather(-1, winner).squeeze(-1).to(torch.int64)

    def argmax(self, dim: int = -1) -> Any:
        """As ``Tensor.argmax`` of the full logits over the vocabulary."""
        if dim not in (-1, 1):
            return self.full().argmax(dim)
        return self.best(self.part())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.full(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.full()[index]

    def __len__(self) -> int:
        return self._shard.shape[0]

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, ShardedLogits):
                return value.full()
            if isinstance(value, (list, tuple)):
                return type(value)(map(plain, value))
            return value

        return func(*plain(args), **{name: plain(value) for name, value in (kwargs or {}).items()})


def given_shard(shard: Any) -> Any:
    """A stand-in for ``lm_head`` whose product is ``shard``: lets the original gather what is computed already."""
    return SimpleNamespace(quant_method=SimpleNamespace(apply=lambda *_, **__: shard))


MASKS = 32  # masks kept per processor


def min_tokens_masks(processor: Any, logits: ShardedLogits, drafts: list[int] | None, device: Any) -> list[Any]:
    """Where MinTokens forbids stop tokens in this rank's part: (rows, columns) index tensors, or None, for the rows

    - ``drafts`` None: [of plain decode], one a request;
    - else: [of drafts, of bonus tokens]: the first ``min_tokens - length`` rows of a request's ``drafts``, and its bonus.

    Kept under a key of their whole content, so that whatever happened to the batch in between an entry found is right.
    """
    first, last = logits.first_token, logits.last_token
    entries = []
    for request, entry in processor.min_toks.items():
        stops = tuple(token for token in entry[2] if first <= token < last)
        left = 0 if drafts is None else min(max(entry[0] - len(entry[1]), 0), drafts[request])
        if stops:
            entries.append((request, left, stops))
    key = (first, None if drafts is None else tuple(drafts), tuple(entries))
    cache = processor.__dict__.setdefault("_overlay_shard_masks", {})
    if key not in cache:
        if len(cache) >= MASKS:
            del cache[next(iter(cache))]
        single = [(request, token - first) for request, _, stops in entries for token in stops]
        found = [single]
        if drafts is not None:
            starts = [sum(drafts[:request]) for request in range(len(drafts))]
            found.insert(
                0,
                [
                    (starts[request] + row, token - first)
                    for request, left, stops in entries
                    for row in range(left)
                    for token in stops
                ],
            )
        cache[key] = [_on_device(pairs, device) if pairs else None for pairs in found]
    return cache[key]


def _on_device(pairs: list[tuple[int, int]], device: Any) -> tuple[Any, Any]:
    import torch

    both = torch.tensor(pairs, dtype=torch.int64, pin_memory=True).t().contiguous()
    if torch.device(device).type != "cpu":
        both = both.pin_memory()
    rows, columns = both.to(device, non_blocking=True)
    return rows, columns
