"""Whatever a patch leaves out of ``_prepare_inputs``, the device holds the same after every step."""

from __future__ import annotations

import contextlib
import functools

import pytest

from tests.support import applied

pytestmark = pytest.mark.ascend

STEPS = 200


@pytest.fixture(autouse=True)
def without_weights(world, monkeypatch):
    """A dummy run needs weights: what it writes is done by hand (the runner's own cannot be fingerprinted then). The
    slot kernel is not interpreted in every step, but replaced by an equal one; ``test_slot_mapping`` runs the real one.
    """
    import replay
    from vllm_ascend.worker import block_table
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    monkeypatch.setattr(NPUModelRunner, "_dummy_run", replay.dummy_run)
    monkeypatch.setattr(block_table, "_compute_slot_mapping_kernel", replay.FastSlotKernel())


@functools.cache
def stock(speculation: bool, seed: int):
    import replay

    return replay.play(seed, STEPS, speculation=speculation)


def test_two_plays_of_one_seed_are_equal_and_of_two_seeds_are_not(world):
    import replay

    assert replay.differences(stock(True, 11)[:25], replay.play(11, 25, speculation=True)) == {}
    assert replay.differences(stock(True, 11)[:5], replay.play(12, 5, speculation=True)) != {}


ALL = (
    "ascend-snapshot-copy",
    "ascend-unchanged-copies",
    "ascend-spec-metadata",
    "ascend-block-table-dirty",
    "ascend-host-slot-mapping",
)


@pytest.mark.parametrize(
    "patches, speculation, events",
    [
        (ALL[:1], True, ("hit",)),
        (ALL[1:2], True, ("hit", "sent")),
        (ALL[2:3], True, ("hit", "built")),
        (ALL[3:4], True, ("hit", "refused: changed")),
        (ALL[4:], True, ("hit", "positions hit")),
        (ALL, True, ("hit",)),
        (ALL, False, ("hit",)),
    ],
    ids=["snapshot", "unchanged", "metadata", "block table", "slots and positions", "all", "all, no speculation"],
)
def test_the_device_holds_the_same_after_every_step(world, patches, speculation, events):
    import replay

    from overlay.runtime import Counters

    last = Counters(patches[-1])
    before = {event: last.get(event) for event in events}
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(applied(patch, accept_drift=patch == "ascend-block-table-dirty"))
        found = replay.play(11, STEPS, speculation=speculation)
    assert replay.differences(stock(speculation, 11), found) == {}
    for event in events:
        assert last.get(event) > before[event] + 2, event


def _published(runner):
    """The published rules: nothing is copied while counts stay, and of discards only where there are some."""

    def rule(buffer, counts):
        copy = type(buffer).__mro__[1].copy_to_gpu

        def copy_to_gpu(n=None):
            now = counts()
            if now is None or now == getattr(buffer, "_then", ()):
                return buffer.gpu if n is None else buffer.gpu[:n]
            buffer._then = now
            return copy(buffer, n)

        buffer.copy_to_gpu = copy_to_gpu

    requests = lambda: (runner.input_batch.num_reqs,)  # noqa: E731
    tokens = lambda: (runner.input_batch.num_reqs, int(runner.query_start_loc.np[runner.input_batch.num_reqs]))  # noqa: E731
    discards = lambda: (object(),) if runner.num_discarded_requests else None  # noqa: E731
    for name, counts in {
        "discard_request_indices": discards,
        "discard_request_mask": discards,
        "req_indices": tokens,
        "query_pos": tokens,
        "num_scheduled_tokens": requests,
    }.items():
        rule(getattr(runner, name), counts)


def test_the_rules_of_equal_counts_leave_wrong_buffers(world):
    import replay

    with applied("ascend-unchanged-copies"):
        found = replay.play(11, STEPS, _published, speculation=True)
    wrong = replay.differences(stock(True, 11), found)
    expected = {"discard_request_mask", "num_scheduled_tokens", "positions", "query_pos", "req_indices", "seq_lens"}
    assert wrong.keys() >= expected | {"slot_mapping.0", "slot_mapping.1"}


def test_a_checksum_of_the_first_row_leaves_a_wrong_block_table(world, monkeypatch):
    """The published rule commits nothing while one request stays and the sum of its row does."""
    import replay
    from vllm_ascend.worker.block_table import BlockTable

    original = BlockTable.commit_block_table

    def commit(self, num_reqs):
        state = (num_reqs, int(self.block_table.np[0].sum()))
        if num_reqs == 1 and getattr(self, "_published", None) == state:
            return
        self._published = state
        original(self, num_reqs)

    runner = replay.make_runner(speculation=False)
    monkeypatch.setattr(BlockTable, "commit_block_table", commit)
    table = runner.input_batch.block_table[0]
    table.add_row([1, 9], 0)
    table.commit_block_table(1)
    table.add_row([9, 1], 0)
    table.commit_block_table(1)
    assert not table.block_table.gpu[0].equal(table.block_table.cpu[0])


def test_optimistic_positions_are_never_used(world):
    """Two drafts rejected under asynchronous scheduling: the device corrects, the host has not."""
    import replay
    import torch

    from overlay.runtime import Counters

    counts = Counters("ascend-host-slot-mapping")

    def run():
        runner = replay.make_runner(speculation=True)
        history = replay.History(runner, 5)
        request = replay.Request("one", list(range(9)))
        history.running = [request]
        history.rng.random = lambda: 0.95  # nobody comes or goes, no drafts
        history.rng.choice = max  # the whole prompt at once
        history.step()
        # A step of three tokens from position 9 has run since, of which two were drafts. The host takes them as accepted
        # and goes on at 12; the device knows that one token was, and goes on at 10.
        request.output += [4, 5, 6]
        request.computed, request.drafts = 12, [7, 8]
        runner.use_async_scheduling = runner.use_async_spec_decode = True
        runner.num_computed_tokens[0] = 9
        runner.requests["one"].prev_num_draft_len = 2
        runner.valid_sampled_token_count_gpu = torch.tensor([1], dtype=torch.int32)
        runner.valid_sampled_token_count_event = torch.npu.Event()
        runner.valid_sampled_token_count_cpu = torch.tensor([1], dtype=torch.int32)
        runner.input_batch.prev_sampled_token_ids = torch.tensor([[3, -1, -1]], dtype=torch.int32)
        runner.input_batch.prev_req_id_to_index = {"one": 0}
        seen = history.step()
        return seen, runner._positions_np_buf[:3].copy()

    expected, host = run()
    assert expected["positions"][:3].tolist() == [10, 11, 12]
    assert host.tolist() == [12, 13, 14]  # slots of these would overwrite others' keys and values
    before = counts.get("refused: optimistic positions"), counts.get("refused: positions: optimistic")
    with applied("ascend-host-slot-mapping"):
        found, _ = run()
    assert replay.differences([expected], [found]) == {}
    assert counts.get("refused: optimistic positions") > before[0]
    assert counts.get("refused: positions: optimistic") > before[1]
