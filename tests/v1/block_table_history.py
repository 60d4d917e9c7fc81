"""A seeded history of a V1 input batch, replayed against the real ``InputBatch`` and ``BlockTable`` of a release.

One history is made of scheduler-like steps (new requests, chunks of a prompt, decode across block boundaries, finish,
preemption and resume with other blocks, swap, condense, reuse of a row) and of everything else that touches a block
table: metadata building that overwrites device rows of padding, a warm-up that clears the tables and puts them back,
whole clears. ``replay`` returns the device's copy of every table after every step. Played once against the stock
classes and once under the patch, both must be equal.
"""

from __future__ import annotations

import inspect
import random
from typing import Any

import numpy as np

MAX_REQS = 8
MAX_LEN = 512
BLOCK_SIZES = (16, 32, 128)


def make_batch() -> Any:
    """An ``InputBatch`` of three KV cache groups on the CPU, whose "device" tensors are tensors of their own."""
    import torch
    from vllm.v1.worker.gpu_input_batch import InputBatch

    wanted = {
        "max_num_reqs": MAX_REQS,
        "max_model_len": MAX_LEN,
        "max_num_batched_tokens": 256,
        "device": torch.device("cpu"),
        "pin_memory": False,
        "vocab_size": 128,
        "block_sizes": list(BLOCK_SIZES),
        # The middle group's kernel works on half its block size (where the release has that notion).
        "kernel_block_sizes": [16, 16, 128],
        "max_num_blocks_per_req": [MAX_LEN // size for size in BLOCK_SIZES],
    }
    known = inspect.signature(InputBatch.__init__).parameters
    batch = InputBatch(**{name: value for name, value in wanted.items() if name in known})
    for table in batch.block_table.block_tables:
        assert table.block_table.gpu.data_ptr() != table.block_table.cpu.data_ptr()
    return batch


class History:
    """The scheduler's side: who runs, with which blocks, and what happens next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.batch = make_batch()
        self.requests: dict[str, Any] = {}  # running
        self.preempted: dict[str, Any] = {}
        self.names = 0
        self.blocks = 0

    def new_blocks(self, number: int) -> list[int]:
        self.blocks += number
        return [self.random.randrange(1, 10_000) for _ in range(number)]

    def blocks_for(self, tokens: int, had: int) -> tuple[list[int], ...]:
        """Blocks of each group that ``tokens`` tokens need beyond those that ``had`` tokens needed."""
        return tuple(self.new_blocks(-(-tokens // size) - -(-had // size)) for size in BLOCK_SIZES)

    def add(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        if self.preempted and self.random.random() < 0.5:
            name = self.random.choice(list(self.preempted))
            state = self.preempted.pop(name)
            state.block_ids = self.blocks_for(state.num_computed_tokens, 0)  # resumed: other blocks
        else:
            self.names += 1
            name = f"request-{self.names}"
            length = self.random.choice((3, 16, 17, 40, 200))
            chunk = min(length, self.random.choice((8, 16, 64)))  # the first chunk of a prompt, or all of it
            state = CachedRequestState(
                req_id=name,
                prompt_token_ids=[self.random.randrange(128) for _ in range(length)],
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0),
                generator=None,
                block_ids=self.blocks_for(chunk, 0),
                num_computed_tokens=chunk,
                output_token_ids=[],
            )
        self.requests[name] = state
        self.batch.add_request(state)

    def remove(self, preempt: bool) -> None:
        name = self.random.choice(list(self.requests))
        state = self.requests.pop(name)
        self.batch.remove_request(name)
        if preempt:
            self.preempted[name] = state

    def advance(self) -> None:
        """Every running request computes a token or a chunk; blocks are appended as it grows, mostly none."""
        for name, state in self.requests.items():
            tokens = state.num_computed_tokens + self.random.choice((1, 1, 1, 1, 1, 1, 1, 1, 1, 24))
            if tokens > MAX_LEN - 32:
                continue
            fresh = self.blocks_for(tokens, state.num_computed_tokens)
            if any(fresh):  # as vLLM: None where no group got a block, else one list per group, empty or not
                for old, new in zip(state.block_ids, fresh, strict=True):
                    old.extend(new)
                self.batch.block_table.append_row(fresh, self.batch.req_id_to_index[name])
            state.num_computed_tokens = tokens

    def build_metadata(self, num_reqs: int) -> None:
        """As ``_build_attention_metadata``: device rows beyond the requests become padding."""
        padded = min(MAX_REQS, num_reqs + self.random.choice((0, 0, 1, 2, 4)))
        for table in self.batch.block_table.block_tables:
            table.get_device_tensor(padded)[num_reqs:padded].fill_(self.random.choice((-1, 0)))

    def warm_up_elsewhere(self) -> None:
        """As ``preserve_serving_state`` and elastic EP: save, clear, commit for a dummy batch, put back."""
        tables = self.batch.block_table
        saved = [(t.block_table.gpu.clone(), t.block_table.cpu.clone()) for t in tables.block_tables]
        tables.clear()
        tables.commit_block_table(max(1, len(self.requests)))
        for table, (device, host) in zip(tables.block_tables, saved, strict=True):
            table.block_table.gpu.copy_(device)
            table.block_table.cpu.copy_(host)

    def step(self) -> None:
        pick = self.random.random()
        running = len(self.requests)
        if not running or (running < MAX_REQS and pick < 0.10):
            self.add()
        elif pick < 0.16:
            self.remove(preempt=False)
        elif pick < 0.21:
            self.remove(preempt=True)
        elif pick < 0.23 and running < MAX_REQS:  # one leaves and another takes its row in the same step
            self.remove(preempt=False)
            self.add()
        elif pick < 0.27 and running > 1:
            self.batch.swap_states(*self.random.sample(range(running), 2))
        elif pick < 0.275:
            self.warm_up_elsewhere()
        elif pick < 0.28:
            for name in list(self.requests):
                self.batch.remove_request(name)
            self.requests.clear()
            self.batch.block_table.clear()
        self.batch.condense()
        self.batch.refresh_metadata()
        self.advance()
        if self.requests:
            self.batch.block_table.commit_block_table(self.batch.num_reqs)


def replay(seed: int, steps: int) -> list[list[np.ndarray]]:
    """The device's copy of every block table (int32 [requests, blocks]) after the commit of every step."""
    history = History(seed)
    seen = []
    for _ in range(steps):
        history.step()
        seen.append([t.block_table.gpu.numpy().copy() for t in history.batch.block_table.block_tables])
        if history.requests:
            history.build_metadata(history.batch.num_reqs)
    return seen
