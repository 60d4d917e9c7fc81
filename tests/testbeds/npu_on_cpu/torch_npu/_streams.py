"""Streams, events and host-to-device copies, observable.

Work is done at once, on the CPU, whatever the stream. What a real device would leave open is kept for tests:

``trace``  what was recorded, waited for and synchronised, and a vector clock a stream. ``trace.access`` notes that the
    current stream reads or writes a storage, and ``trace.races`` lists the accesses that no event orders.
``copies`` with ``copies.delay()``, a non-blocking copy reads its source only at the next synchronisation, the latest
    moment at which a DMA engine may do so. A queued copy keeps its source alive, as the caching host allocator does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Clock = dict[int, int]


@dataclass(frozen=True)
class Access:
    """One access of a storage: by which stream, at which of its ticks, knowing which ticks of the others."""

    storage: int
    stream: int
    tick: int
    clock: Clock
    write: bool
    what: str

    def before(self, other: Access) -> bool:
        """Whether the stream order or an event puts this access before ``other``."""
        return other.clock.get(self.stream, 0) >= self.tick


@dataclass
class Trace:
    """Events and accesses since the last ``clear``. Off until ``on``."""

    on: bool = False
    events: Counter[str] = field(default_factory=Counter)
    accesses: list[Access] = field(default_factory=list)

    def clear(self) -> None:
        self.events.clear()
        self.accesses.clear()

    def note(self, event: str) -> None:
        if self.on:
            self.events[event] += 1

    def access(self, storage: int, write: bool, what: str) -> None:
        """The current stream reads or writes the storage with that identity."""
        if self.on:
            running = current_stream()
            running.tick()
            self.accesses.append(Access(storage, running.id, running.clock[running.id], dict(running.clock), write, what))

    def races(self) -> list[tuple[Access, Access]]:
        """Pairs on one storage, on two streams, at least one a write, that nothing orders."""
        found = []
        for first, second in itertools.combinations(self.accesses, 2):
            if (
                first.storage == second.storage
                and first.stream != second.stream
                and (first.write or second.write)
                and not first.before(second)
                and not second.before(first)
            ):
                found.append((first, second))
        return found


class Copies:
    """The queue of delayed host-to-device copies."""

    def __init__(self) -> None:
        self.delayed = False
        self.queue: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def delay(self) -> Iterator[None]:
        """Inside: non-blocking copies wait for a synchronisation. On leaving, all are done."""
        self.delayed = True
        try:
            yield
        finally:
            self.delayed = False
            self.finish()

    def finish(self) -> None:
        while self.queue:
            self.queue.pop(0)()


trace = Trace()
copies = Copies()
_numbers = itertools.count(1)


class Stream:
    """A stream: an id and a vector clock (stream id -> the last of its ticks that is known to be over)."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.id = next(_numbers)
        self.clock: Clock = {}

    def tick(self) -> None:
        self.clock[self.id] = self.clock.get(self.id, 0) + 1

    def _learn(self, clock: Clock) -> None:
        for stream_id, tick in clock.items():
            self.clock[stream_id] = max(tick, self.clock.get(stream_id, 0))

    def wait_stream(self, other: Stream) -> None:
        trace.note("wait_stream")
        self._learn(other.clock)

    def wait_event(self, event: Event) -> None:
        trace.note("wait_event")
        self._learn(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        trace.note("synchronize")
        copies.finish()

    def query(self) -> bool:
        return not copies.queue

    def __enter__(self) -> Stream:
        _running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _running.pop()


class Event:
    """The state of a stream's clock at the moment of ``record``."""

    def __init__(self, *_: object, **__: object) -> None:
        self.clock: Clock = {}
        self.pending: list[Callable[[], object]] = []

    def record(self, stream: Stream | None = None) -> None:
        trace.note("record")
        self.clock = dict((stream or current_stream()).clock)
        self.pending = list(copies.queue)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        trace.note("synchronize")
        copies.finish()

    def query(self) -> bool:
        return not any(copy in copies.queue for copy in self.pending)

    def reset(self, stream: Stream | None = None) -> None:
        self.clock = {}

    def elapsed_time(self, other: Event) -> float:
        raise NotImplementedError("the CPU testbed measures no device time")


_default = Stream()
_running = [_default]


def current_stream(device: object = None) -> Stream:
    return _running[-1]


def default_stream(device: object = None) -> Stream:
    return _default


def set_stream(stream: Stream) -> None:
    _running[-1] = stream


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[Stream | None]:
    if chosen is None:
        yield None
        return
    with chosen:
        yield chosen


def synchronize(device: object = None) -> None:
    trace.note("synchronize")
    copies.finish()
