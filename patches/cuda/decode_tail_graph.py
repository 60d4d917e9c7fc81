"""Logits, argmax and the update of the request states of a greedy decode step as one captured graph.

Behind the model's own graph a greedy decode step of the V2 runner launches the product with lm_head (two device
operations), the argmax and the update of the request states, each from Python. They read and write fixed addresses: the
model graph's hidden states, lm_head, the request states, and the batch that ``decode-input-prep-v2`` holds on the device.
So they are one graph for each number of requests, with as many rows as the original's product has.

The graph also copies the tokens to the host, to one of a few places in turn: a place that has not been read yet is not
written, the step then takes the original.

Only steps that ``decode-input-prep-v2`` prepared and ``greedy-tail`` would sample get here, behind a captured model step.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from overlay.runtime import Counters, options
from overlay.spec import Condition, Exactness, Kind, Option, Patch, Target
from patches._lib.step_graphs import StepGraphs
from patches._lib.v2_fingerprints import seen
from patches.common import decode_input_prep_v2, greedy_tail

_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

PATCH = Patch(
    id="decode-tail-graph",
    kind=Kind.CODE,
    summary="V2 runner: logits, argmax and state update of a greedy decode step in one graph launch",
    why=(
        "After sampler and input preparation were cut down, sample_tokens still took 0.45 to 0.5 ms of a step's 1.5 on the "
        "host of an H200 (vLLM 0.26.0, Qwen3-0.6B): the product with lm_head 80 us, argmax 100, state update 57."
    ),
    remove_when="vLLM captures the sampling of a decode step",
    exactness=Exactness.BITWISE,
    targets=(
        Target(
            at=f"{_RUNNER}.sample", use="sample", fingerprints=seen("29931dd63ee7b381 edbb074d0561ac37 = 8aa62d77bd2a7373 =")
        ),
        Target(
            at=f"{_RUNNER}.postprocess_sampled",
            use="postprocess_sampled",
            fingerprints=seen("4b22298639adee22 178ce636791a07bb = 0611d51cda5d0e25 ff8c900909c702f0"),
        ),
        Target(
            at="vllm.v1.worker.gpu.async_utils:AsyncOutput.__init__",
            use="async_output",
            fingerprints=seen("a54330e87d89ebb3 6eebbde41ce9f26c b9eb3cd42a74c01b e1b5ec1efcf07ed0 ="),
        ),
    ),
    assumes=(
        Target(
            at=f"{_RUNNER}.sample_tokens",
            fingerprints=seen("8ea42cc03ae8983a 4c2308c6a815b3c3 30c623a9923d377c c8d788da82fb68e0 3a660f71d523963b"),
        ),
        Target(at="vllm.v1.worker.gpu.input_batch:post_update", fingerprints=seen("39199753a0c6b49c = = = a1d3dbc69af84003")),
        Target(
            at="vllm.v1.worker.gpu.input_batch:_post_update_kernel",
            fingerprints=seen("f33ca26a5182813e = = = ff3563b4f3959a20"),
        ),
        Target(
            at="vllm.v1.worker.gpu.model_states.interface:ModelState.postprocess_state",
            fingerprints=seen("6f9575653268568c c08f3d264ffa1824 = = ="),
        ),
        Target(
            at="vllm.model_executor.layers.logits_processor:LogitsProcessor",
            fingerprints=seen("8c2a8e8e3491a391 d2c7c308a6faceab 7aeca9ea03c402f1 aed78543409da907 ="),
        ),
        Target(
            at="vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.run_fullgraph",
            fingerprints=seen("c9436856734f3c34 = = = ="),
        ),
    ),
    condition=Condition(
        vllm=">=0.23.0,<0.34",
        runner="V2",
        platforms=("cuda",),
        facts={
            "serving.num_speculative_tokens": 0,
            "serving.pipeline_parallel": 1,
            "serving.tensor_parallel": 1,
            "serving.enforce_eager": False,
            "serving.lora": False,  # its logits set flags on the host that a graph would keep
        },
    ),
    options={"requests": Option(64, "largest batch that gets a graph of its own")},
    requires=("decode-input-prep-v2", "greedy-tail"),
    after=("decode-input-prep-v2", "greedy-tail"),
    live=("model_runner",),
    tests="tests/v2/cases/case_tail_graph.py",
    measured="ab_runs/results/host/h200_qwen3_0.6b.yaml",
)

count = Counters(PATCH.id)

_STATE = "_overlay_tail"
_PARTS = 64  # of the vocabulary, a program each
_IN_FLIGHT = 3  # steps whose tokens the host has not read yet: two under asynchronous scheduling


class _HostTokens:
    """Stands for a step's tokens where their copy to the host is asked for: the graph has made it. int64 [n, 1]."""

    def __init__(self, place: Any) -> None:
        self.place = place
        self.read = False

    def to(self, *args: Any, **kwargs: Any) -> _HostTokens:
        return self

    def numpy(self) -> _HostTokens:
        return self

    def tolist(self) -> list[list[int]]:
        """Asked for once, behind the event that says that the copy is done."""
        found = self.place.tolist()
        self.read = True
        return found


class _Tail:
    """Of one runner, for as long as its buffers are the same objects."""

    def __init__(self, runner: Any, requests: int) -> None:
        import torch

        self.requests, self.sampler = runner.req_states, runner.sampler
        self.graphs = StepGraphs(count, limit=4 * requests)
        self.sampled = torch.zeros((requests, 1), dtype=torch.int64, device=runner.device)
        self.best = torch.zeros((requests, _PARTS, 2), dtype=torch.float64, device=runner.device)
        pinned = runner.device.type == "cuda"
        self.host = [torch.zeros((requests, 1), dtype=torch.int64, pin_memory=pinned) for _ in range(_IN_FLIGHT)]
        self.numbers = [place.numpy() for place in self.host]
        self.unread: list[Any] = [None] * _IN_FLIGHT  # weak: the step's _HostTokens that has the place
        self.turn = 0
        self.views: dict[int, Any] = {}  # number of requests -> its rows of ``sampled``
        self.done: Any = None  # the tokens for which the request states are up to date

    def next_place(self) -> int | None:
        """Where the next step's tokens may go, or None where those of an earlier step wait to be read."""
        turn = (self.turn + 1) % _IN_FLIGHT
        waiting = self.unread[turn] and self.unread[turn]()
        return None if waiting is not None and not waiting.read else turn


def _tail_of(runner: Any) -> _Tail:
    tail = runner.__dict__.get(_STATE)
    if tail is None or tail.requests is not runner.req_states or tail.sampler is not runner.sampler:
        tail = runner.__dict__[_STATE] = _Tail(runner, max(1, options(PATCH.id).get("requests", 64)))
    return tail


def sample(wrapped: Any, runner: Any, args: tuple, kwargs: dict) -> Any:
    reason = _refusal(runner, args, kwargs)
    if reason is not None:
        count.refuse(reason)
        return wrapped(*args, **kwargs)
    hidden, batch, _ = args
    state = decode_input_prep_v2.prepared(runner, batch)
    tail, n, rows = _tail_of(runner), batch.num_reqs, batch.num_reqs_after_padding
    place = tail.next_place()
    if n > tail.sampled.shape[0] or place is None:
        count.refuse("more steps in flight than there are places" if place is None else "more requests than the graphs are for")
        return wrapped(*args, **kwargs)
    sampled = tail.views.get(n)
    if sampled is None:
        sampled = tail.views[n] = tail.sampled[:n]
    output = greedy_tail.output_of(sampled)
    rejected = greedy_tail.counts(sampled.device, n)[1]

    def work() -> None:
        _argmax(runner.model.compute_logits(hidden[:n]), tail.best[:n], sampled)
        tail.host[place][:n].copy_(sampled, non_blocking=True)
        starts = runner.input_buffers.query_start_loc[: rows + 1]
        runner.postprocess_sampled(state.slots[:n], sampled, output.num_sampled, rejected, starts)

    tail.done = None
    replayed, _ = tail.graphs.run((n, rows, place, *_addresses(runner, hidden)), work)
    tail.done, tail.turn = sampled, place
    tokens = output.__dict__[_STATE] = _HostTokens(tail.numbers[place][:n])
    tail.unread[place] = weakref.ref(tokens)
    if replayed:
        count.hit()
    else:
        count.refuse("not captured yet")
    return output, output.num_sampled, rejected


def _addresses(runner: Any, hidden: Any) -> tuple[int, ...]:
    """Of what the graph reads and writes and this patch does not own."""
    requests = runner.req_states
    return (
        hidden.data_ptr(),
        runner.model.lm_head.weight.data_ptr(),
        requests.num_computed_tokens.gpu.data_ptr(),
        requests.total_len.gpu.data_ptr(),
        requests.all_token_ids.gpu.data_ptr(),
        requests.last_sampled_tokens.data_ptr(),
    )


def _argmax(logits: Any, best: Any, sampled: Any) -> None:
    """As ``greedy_tail.argmax``, over parts of the vocabulary at once: in a graph a second launch costs the host nothing.

    logits: float [n, vocab]; best: float64 [n, parts, 2], scratch; sampled: int64 [n, 1].
    """
    from patches._lib.v2_decode_kernels import best_of_parts_kernel, part_argmax_kernel

    n, vocab_size = logits.shape
    part = -(-vocab_size // _PARTS)
    part_argmax_kernel[(n, _PARTS)](logits, logits.stride(0), best, vocab_size, part, PARTS=_PARTS, BLOCK=1024)
    best_of_parts_kernel[(n,)](best, sampled, PARTS=_PARTS)


def _refusal(runner: Any, args: tuple, kwargs: dict) -> str | None:
    """Why this step takes the original."""
    if len(args) != 3 or kwargs:
        return "called in another way"
    hidden, batch, grammar = args
    if decode_input_prep_v2.prepared(runner, batch) is None:
        return "inputs prepared by the original"
    if grammar is not None:
        return "structured output"
    if getattr(runner, "lora_config", None) is not None:
        return "LoRA"
    if getattr(runner, "batch_sharder", None) is not None:
        return "logits computed by shards"
    if getattr(runner, "pp_handler", None) is not None:
        return "pipeline parallelism"
    if type(runner.model_state).__name__ != "DefaultModelState":
        return "a model state of its own"
    static = captured_hidden_states(runner)
    if static is None or hidden.data_ptr() != static.data_ptr() or hidden.stride() != static.stride():
        return "not behind a captured model step"
    if not plain_logits(runner.model):
        return "logits computed in a way of its own"
    return greedy_tail.refusal(runner.sampler, batch)


def captured_hidden_states(runner: Any) -> Any:
    """Where the captured model steps leave their hidden states, or None without such steps."""
    return getattr(getattr(runner, "cudagraph_manager", None), "hidden_states", None)


def plain_logits(model: Any) -> bool:
    """Whether ``compute_logits`` is nothing but the logits processor over this rank's whole lm_head."""
    code = getattr(getattr(type(model), "compute_logits", None), "__code__", None)
    if code is None or code.co_names != ("logits_processor", "lm_head"):
        return False
    processor = getattr(model, "logits_processor", None)
    if type(processor).__name__ != "LogitsProcessor" or getattr(processor, "logits_as_input", False):
        return False
    return getattr(getattr(model, "lm_head", None), "weight", None) is not None and getattr(model.lm_head, "tp_size", 0) == 1


def postprocess_sampled(wrapped: Any, runner: Any, args: tuple, kwargs: dict) -> Any:
    """Nothing where the graph has updated the request states already: asked for once, with the same tokens."""
    tail = runner.__dict__.get(_STATE)
    if tail is not None and tail.done is not None and len(args) > 1 and args[1] is tail.done:
        tail.done = None
        return None
    return wrapped(*args, **kwargs)


def async_output(wrapped: Any, output: Any, args: tuple, kwargs: dict) -> Any:
    """The graph has brought the tokens to the host: only the event behind it is recorded."""
    tokens = getattr(kwargs.get("sampler_output"), _STATE, None)
    if tokens is not None:
        given = copy.copy(kwargs["sampler_output"])
        given.sampled_token_ids = tokens
        kwargs = {**kwargs, "sampler_output": given}
    return wrapped(*args, **kwargs)
