"""decode-input-prep: every condition of its two gates broken once, and what it does when buffers move."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.support import applied
from tests.v1 import lab
from tests.v1.checks.block_table import counted, spent

PATCH = "decode-input-prep"


def steady(requests: int = 2, **settings: Any) -> lab.Lab:
    """A lab whose next step is a pure decode step of ``requests`` requests."""
    world = lab.Lab(21, **settings)
    for i in range(requests):
        world.add(5 + 3 * i, 80)
    for _ in range(4):
        world.step(churn=False)
    return world


class Attribute:
    """Sets an attribute of one object and puts the old one back."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value

    def __enter__(self) -> None:
        self.had = self.name in vars(self.owner)
        self.old = getattr(self.owner, self.name, None)
        setattr(self.owner, self.name, self.value)

    def __exit__(self, *exception: object) -> None:
        if self.had:
            setattr(self.owner, self.name, self.old)
        else:
            delattr(self.owner, self.name)


def check_each_service_condition_turns_the_fast_path_off(release: str) -> dict[str, Any]:
    from patches._lib import v1_decode_state
    from patches.common.decode_input_prep import service_reason

    world = steady()
    runner = world.runner
    assert service_reason(runner) is None
    parallel, model = runner.parallel_config, runner.model_config
    ubatch = SimpleNamespace(
        **{
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "use_ubatching": True,
        }
    )
    broken: dict[str, tuple[Any, str, Any]] = {
        "no asynchronous scheduling": (runner, "use_async_scheduling", False),
        "speculation": (runner, "num_spec_tokens", 2),
        "LoRA": (runner, "lora_config", object()),
        "pipeline parallel": (parallel, "pipeline_parallel_size", 2),
        "decode context parallel": (parallel, "decode_context_parallel_size", 2),
        "prefill context parallel": (parallel, "prefill_context_parallel_size", 2),
        "prompt embeddings": (runner, "enable_prompt_embeds", True),
        "XD-RoPE": (runner, "uses_xdrope_dim", 3),
        "micro-batches": (runner, "parallel_config", ubatch),
        "pooling model": (runner, "is_pooling_model", True),
        "routed experts": (runner, "routed_experts_initialized", True),
        "Mamba state of all steps": (runner, "mamba_prev_last_scheduled_idx", object()),
        "no Triton kernels here": (v1_decode_state, "kernels_run", lambda device: False),
    }
    for reason, (owner, name, value) in broken.items():
        with Attribute(owner, name, value):
            assert service_reason(runner) == reason
    encoder = SimpleNamespace(is_encoder_decoder=True)
    with Attribute(runner, "model_config", encoder):
        assert service_reason(runner) == "encoder-decoder"
    with Attribute(runner, "speculative_config", object()):
        assert service_reason(runner) == "speculation"
    assert service_reason(runner) is None and model is runner.model_config
    with applied(PATCH, version=release):
        before = counted(PATCH)
        other = lab.Lab(22)
        other.runner.use_async_scheduling = False
        other.add(3, 4)
        output, tokens = other.schedule()
        other.runner._prepare_inputs(output, tokens)
        assert spent(PATCH, before) == {"refused: service: no asynchronous scheduling": 1}
    return {"reasons": len(broken) + 2}


def _breaks(world: lab.Lab) -> dict[str, Callable[[Any, Any], Any]]:
    """reason -> change to (scheduler output, tokens); returns the tokens."""
    import torch

    runner = world.runner
    batch = runner.input_batch
    name = batch.req_ids[1]

    def sampled(value: Any) -> Callable[[Any, Any], Any]:
        def change(output: Any, tokens: Any) -> Any:
            batch.prev_sampled_token_ids = value
            return tokens

        return change

    def rows(output: Any, tokens: Any) -> Any:
        batch.prev_req_id_to_index = {batch.req_ids[0]: 1, batch.req_ids[1]: 0}
        return tokens

    def gone(output: Any, tokens: Any) -> Any:
        batch.prev_req_id_to_index = {}
        return tokens

    def many(output: Any, tokens: Any) -> Any:
        output.total_num_scheduled_tokens += 1
        output.num_scheduled_tokens[name] += 1
        tokens[1] += 1
        return tokens

    def draft(output: Any, tokens: Any) -> Any:
        output.scheduled_spec_decode_tokens[name] = [3]
        return tokens

    def encoder(output: Any, tokens: Any) -> Any:
        output.scheduled_encoder_inputs[name] = [0]
        return tokens

    def fresh(output: Any, tokens: Any) -> Any:
        output.scheduled_new_reqs.append(object())
        return tokens

    def resumed(output: Any, tokens: Any) -> Any:
        output.scheduled_cached_reqs.resumed_req_ids.add(name)
        return tokens

    def embeds(output: Any, tokens: Any) -> Any:
        batch.req_prompt_embeds[7] = torch.zeros(1, 4)
        return tokens

    def prompt(output: Any, tokens: Any) -> Any:
        runner.requests[name].num_prompt_tokens += 50
        return tokens

    def gap(output: Any, tokens: Any) -> Any:
        runner.requests[name].output_token_ids.append(-1)
        return tokens

    def stale(output: Any, tokens: Any) -> Any:
        lengths = runner.optimistic_seq_lens_cpu.numpy() if hasattr(runner, "optimistic_seq_lens_cpu") else None
        (runner.seq_lens.np if lengths is None else lengths)[1] += 1
        return tokens

    wide = torch.zeros(2, 2, dtype=torch.int32)
    return {
        "more than one token": many,
        "draft tokens": draft,
        "encoder inputs": encoder,
        "new requests": fresh,
        "resumed requests": resumed,
        "no tokens on the device": sampled(None),
        "another number of requests": sampled(torch.zeros(3, 1, dtype=torch.int32)),
        "tokens of another kind": sampled(torch.zeros(2, 1, dtype=torch.int64)),
        "tokens of another kind ": sampled(wide[:, :1]),
        "prompt embeddings": embeds,
        "rows moved": rows,
        "rows moved ": gone,
        "prompt not done": prompt,
        "tokens do not continue": gap,
        "lengths do not continue": stale,
    }


def check_each_step_condition_takes_the_original(release: str) -> dict[str, Any]:
    """The refusal is counted under its reason, nothing of the fast path runs, and the original has the step."""
    seen = []
    for reason in list(_breaks(steady())):
        with applied(PATCH, version=release) as application:
            world = steady()
            change = _breaks(world)[reason]
            output, tokens = world.schedule()
            assert len(tokens) == 2
            tokens = change(output, tokens)
            calls = []
            original = application.sites[0].original

            def spy(*args: Any, calls: list[Any] = calls, original: Any = original) -> Any:
                calls.append(args)
                return original(*args)

            wrapper = vars(type(world.runner))["_prepare_inputs"]
            wrapper.__wrapped__ = spy
            before = counted(PATCH)
            try:
                world.runner._prepare_inputs(output, tokens)
            except Exception:
                pass  # some of these states the original cannot take either
            finally:
                wrapper.__wrapped__ = original
            events = spent(PATCH, before)
            assert events == {f"refused: {reason.strip()}": 1}, (reason, events)
            assert calls, reason
        seen.append(reason)
    return {"reasons": seen}


def check_the_first_step_goes_to_the_original(release: str) -> dict[str, Any]:
    """What else ``_prepare_inputs`` returns in this release is learnt from the original before a fast step is taken."""
    with applied(PATCH, version=release):
        before = counted(PATCH)
        world = steady()
        del world.runner.__dict__["_overlay_decode"]
        before = counted(PATCH)
        for _ in range(3):
            world.step(churn=False)
        events = spent(PATCH, before)
    assert events == {"built": 1, "refused: first step": 1, "hit": 2}, events
    return events


def check_moved_buffers_rebuild_the_pointers(release: str) -> dict[str, Any]:
    with applied(PATCH, version=release, shadow=True):
        world = steady()
        runner = world.runner
        table = runner.input_batch.block_table.block_tables[1]
        moves: list[Callable[[], None]] = [
            lambda: setattr(runner.input_ids, "gpu", runner.input_ids.gpu.clone()),
            lambda: setattr(table.slot_mapping, "gpu", table.slot_mapping.gpu.clone()),
            lambda: setattr(table.block_table, "gpu", table.block_table.gpu.clone()),
            lambda: setattr(runner.query_start_loc, "gpu", runner.query_start_loc.gpu.clone()),
        ]
        if hasattr(runner, "num_computed_tokens"):
            moves.append(lambda: setattr(runner, "num_computed_tokens", runner.num_computed_tokens.clone()))
            moves.append(lambda: setattr(runner, "optimistic_seq_lens_cpu", runner.optimistic_seq_lens_cpu.clone()))
        before = counted(PATCH)
        kept = []
        for move in moves:
            kept.append((runner.input_ids.gpu, table.slot_mapping.gpu, table.block_table.gpu))  # no address comes back
            kept.append((runner.query_start_loc.gpu, getattr(runner, "num_computed_tokens", None)))
            kept.append((getattr(runner, "optimistic_seq_lens_cpu", None),))
            move()
            world.step(churn=False)
        events = spent(PATCH, before)
        assert events == {"built": len(moves), "hit": len(moves), "shadow equal": len(moves)}, events
        before = counted(PATCH)
        runner.discard_request_mask.gpu = runner.discard_request_mask.gpu.to("cpu").int()
        world.step(churn=False)
        assert spent(PATCH, before) == {"refused: buffers: a buffer's type or layout": 1}
    return events


def check_a_shadow_difference_is_reported_and_ends_the_fast_path(release: str) -> dict[str, Any]:
    """With a wrong constant in the kernel: the original's values stand, and the runner goes on with the original."""
    with applied(PATCH, version=release, shadow=True):
        world = steady()
        state = world.runner.__dict__["_overlay_decode"].state
        state.groups[:, 3] *= 2  # a wrong block size
        before = counted(PATCH)
        for _ in range(3):
            world.step(churn=False)
        events = spent(PATCH, before)
        mine = world.runner.input_batch.block_table.block_tables[0].slot_mapping.gpu[:2].tolist()
        assert events["shadow different"] == 1, events
        assert events["refused: service: shadow found a difference"] == 2, events
    other = steady()
    for _ in range(3):
        other.step(churn=False)
    assert other.runner.input_batch.block_table.block_tables[0].slot_mapping.gpu[:2].tolist() == mine
    return events


def check_a_kernel_that_does_not_compile_leaves_the_original(release: str) -> dict[str, Any]:
    from patches._lib.v1_decode_state import DecodeState

    def fails(state: Any) -> None:
        raise RuntimeError("no such architecture")

    with applied(PATCH, version=release), Attribute(DecodeState, "compile", fails):
        before = counted(PATCH)
        world = steady()
        world.step(churn=False)
        events = spent(PATCH, before)
    refused = events.pop("refused: buffers: the kernel does not compile")
    assert refused >= 4 and events == {"built": 1}, events
    return {"refused": refused}


def check_the_state_is_made_at_the_end_of_warm_up(release: str) -> dict[str, Any]:
    """``capture_model`` builds it before the first request; that fails on no model, but what follows is the same."""
    with applied(PATCH, version=release) as application:
        world = lab.Lab(23)
        (site,) = [site for site in application.sites if site.name == "capture_model"]
        from patches.common.decode_input_prep import warm

        before = counted(PATCH)
        assert warm(lambda: 7, world.runner, (), {}) == 7
        assert spent(PATCH, before) == {"built": 1}
        assert world.runner.__dict__["_overlay_decode"].state is not None and site.original is not None
    return {}


def check_logits_indices_pick_the_same_rows(release: str) -> dict[str, Any]:
    """A slice, and with fast prefill of shared KV caches the original's int32 indices."""
    import torch

    with applied(PATCH, version=release):
        world = steady()
        hidden = torch.randn(8, 4)
        picked = world.step(churn=False)[0]
        assert isinstance(picked, slice) and torch.equal(hidden[picked], hidden[:2])
        state = world.runner.__dict__["_overlay_decode"].state
        state.fast_prefill = True
        state.indices.clear()
        picked = world.step(churn=False)[0]
        assert picked.dtype is torch.int32 and picked.tolist() == [0, 1]
    return {}
