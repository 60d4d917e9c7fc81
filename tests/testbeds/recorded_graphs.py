"""Device graphs without a device: what a captured graph does with addresses, done with tensors.

``recorded()`` stands in for capture in ``patches._lib.step_graphs``: a capture runs the work and records every operation and
every interpreted Triton launch with the very tensors and numbers that it was given; a replay runs the record again on them.
So what was not in a fixed place, or was read from the host, goes stale here exactly as it does in a captured graph. The first
replay does nothing: the recording run had its effect already, where a real capture has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from patches._lib import step_graphs


class Recorded:
    """A record, with a graph's ``replay``."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.fresh = True

    def replay(self) -> None:
        if self.fresh:
            self.fresh = False
            return
        with torch.inference_mode():
            for step in self.steps:
                step()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Recorded) -> None:
        super().__init__()
        self.graph, self.paused = graph, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.paused:
            places = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]

            def again() -> None:
                found = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
                for place, value in zip(places, found, strict=True):
                    if place.data_ptr() != value.data_ptr():  # not a view or a result in place
                        place.copy_(value)

            self.graph.steps.append(again)
        return result


def record(work: Callable[[], Any], place: Any) -> tuple[Recorded, Any]:
    """What ``step_graphs.capture`` returns: (graph, what ``work`` returned)."""
    graph = Recorded()
    recorder = _Recorder(graph)
    launch = interpreter.GridExecutor.__call__

    def recorded_launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        graph.steps.append(lambda: launch(executor, *args, **kwargs))
        recorder.paused = True
        try:
            return launch(executor, *args, **kwargs)
        finally:
            recorder.paused = False

    interpreter.GridExecutor.__call__ = recorded_launch
    try:
        with recorder:
            result = work()
    finally:
        interpreter.GridExecutor.__call__ = launch
    return graph, result


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, the patches' step graphs are captured and replayed in this way."""
    capture, possible = step_graphs.capture, step_graphs.device_graphs
    step_graphs.capture, step_graphs.device_graphs = record, lambda: True
    try:
        yield
    finally:
        step_graphs.capture, step_graphs.device_graphs = capture, possible
