"""Device work of one place in a decode step, captured once per key and then replayed with one launch.

A decode step issues the same few kernels on the same buffers again and again; each costs 20 to 60 us of host time to
launch from Python, a captured graph of all of them about 10. What is captured reads and writes fixed addresses: whoever
uses this puts everything into the key that the work depends on and that is not in those buffers.

The first call of a key runs the work as it is (which compiles and loads its kernels), the second captures it. A capture
that fails is not tried again: the place runs without graphs from then on, and the counter says so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

_LEARNED = object()


class StepGraphs:
    """The graphs of one place. limit: keys beyond it run as they are."""

    def __init__(self, count: Any, limit: int = 64) -> None:
        self.count = count
        self.limit = limit
        self.kept: dict[Hashable, Any] = {}  # key -> _LEARNED or (graph, what the work returned)
        self.pool: Any = None  # of memory: the graphs of one place replay in one stream, so they share it
        self.failed = False

    def run(self, key: Hashable, work: Callable[[], Any]) -> tuple[bool, Any]:
        """(whether a graph was replayed, what ``work`` returned: of the captured call where it was)."""
        entry = self.kept.get(key)
        if self.failed or (entry is None and len(self.kept) >= self.limit) or not device_graphs():
            return False, work()
        if entry is not None and entry is not _LEARNED:
            entry[0].replay()
            return True, entry[1]
        if entry is None:
            self.kept[key] = _LEARNED
            return False, work()
        try:
            entry = capture(work, self)
        except RuntimeError as error:
            self.failed = True
            self.kept.clear()
            self.count.add(f"capture failed: {str(error).splitlines()[0][:60]}")
            return False, work()
        self.kept[key] = entry
        self.count.add("captured")
        entry[0].replay()
        return True, entry[1]

    def captured(self, key: Hashable) -> Any:
        """The graph of ``key``, with a ``replay``, or None."""
        entry = self.kept.get(key)
        return None if entry is None or entry is _LEARNED else entry[0]


_possible: bool | None = None


def device_graphs() -> bool:
    """Whether work can be captured or replayed here and now."""
    global _possible
    import torch

    if _possible is None:
        _possible = torch.cuda.is_available() and torch.version.hip is None  # HIP's graphs were never tried here
    return _possible and not torch.cuda.is_current_stream_capturing()


_sides: dict[int, Any] = {}  # device index -> the stream of all captures: not the default one, which cannot be captured


def capture(work: Callable[[], Any], place: StepGraphs) -> tuple[Any, Any]:
    """(graph, what ``work`` returned). Nothing of it has run. Raises RuntimeError where something cannot be captured.

    Other threads of the process may go on using the device meanwhile.
    """
    import torch

    device = torch.cuda.current_device()
    side = _sides.get(device)
    if side is None:
        side = _sides[device] = torch.cuda.Stream()
    if place.pool is None:
        place.pool = torch.cuda.graph_pool_handle()
    main = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(main)
    collecting = gc.isenabled()
    gc.disable()  # a collected device object may free memory, which a capture does not allow
    try:
        with torch.cuda.stream(side):
            graph.capture_begin(pool=place.pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                try:
                    graph.capture_end()
                except RuntimeError:
                    pass  # the first error says more
                raise
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    main.wait_stream(side)
    return graph, result
