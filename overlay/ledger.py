"""Receipts and counters of every process of a run.

Counters live in one small memory-mapped file a process, so that reading them costs the server nothing. A patch
holds a ``Counters`` of its own id and calls ``hit()`` where its fast path ran and ``refuse(reason)`` where its gate sent
the call to the original. Without a run folder (a unit test) they count in memory.

A receipt is one JSON file a process: who it is, the plan's digest, the state of every patch there, the live
fingerprints. It is replaced as a whole at each change, so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
from typing import Any

RECORD = 128  # bytes: an 8-byte count, then the name, NUL-padded
RECORDS = 1024
_NAME = RECORD - 8


class _Store:
    """The counter file of this process: fixed records, found again by name."""

    def __init__(self) -> None:
        self._open(None)

    def _open(self, path: str | None) -> None:
        size = RECORD * RECORDS
        if path is None:
            self.memory: Any = bytearray(size)
        else:
            with open(path, "w+b") as file:
                file.truncate(size)
                self.memory = mmap.mmap(file.fileno(), size)
        self.path = path
        self.pid = os.getpid()
        self.counts = memoryview(self.memory).cast("Q")
        self.index: dict[str, int] = {}

    def bind(self, folder: str) -> None:
        """Move the counters to this process's file in ``folder``, keeping what was counted so far."""
        path = os.path.join(folder, f"counters-{os.getpid()}.bin")
        if path == self.path:
            return
        before = {name: self.counts[at] for name, at in self.index.items()} if self.pid == os.getpid() else {}
        self._open(path)
        for name, count in before.items():
            self.counts[self.slot(name)] = count
        for counters in _all:
            counters._slots.clear()

    def slot(self, name: str) -> int:
        """Index into ``counts`` of the counter ``name``. The last record takes what no longer fits."""
        at = self.index.get(name)
        if at is None:
            used = len(self.index)
            if used >= RECORDS - 1:
                name, used = "overlay|counters beyond the file's room", RECORDS - 1
            raw = name.encode()[:_NAME]
            start = used * RECORD
            self.memory[start + 8 : start + 8 + len(raw)] = raw
            at = self.index[name] = used * (RECORD // 8)
        return at


_all: list[Counters] = []
_store = _Store()


def _after_fork() -> None:
    """A forked child counts in a file of its own, from zero."""
    folder = os.path.dirname(_store.path) if _store.path else None
    _store._open(None)
    for counters in _all:
        counters._slots.clear()
    if folder:
        _store.bind(folder)


os.register_at_fork(after_in_child=_after_fork)


class Counters:
    """The counters of one patch in this process.

    Two threads that count the same event at the same moment may lose one: counts show that and how often a path
    is taken, they are no bookkeeping.
    """

    def __init__(self, patch: str) -> None:
        self.patch = patch
        self._slots: dict[str, int] = {}
        _all.append(self)

    def add(self, event: str, number: int = 1) -> None:
        """Count ``number`` of ``event``."""
        at = self._slots.get(event)
        if at is None:
            at = self._slots[event] = _store.slot(f"{self.patch}|{event}")
        _store.counts[at] += number

    def hit(self) -> None:
        """The fast path ran."""
        self.add("hit")

    def refuse(self, reason: str) -> None:
        """The gate sent this call to the original. ``reason`` is one of a small fixed set: a counter each."""
        self.add(f"refused: {reason}")

    def get(self, event: str) -> int:
        return _store.counts[_store.slot(f"{self.patch}|{event}")]

    def all(self) -> dict[str, int]:
        """event -> count, of this patch in this process."""
        return read_memory(_store.memory).get(self.patch, {})


def bind(folder: str) -> None:
    """Keep this process's counters in ``folder`` from now on."""
    _store.bind(folder)


def read_memory(memory: Any) -> dict[str, dict[str, int]]:
    """patch -> event -> count, from the bytes of a counter file."""
    found: dict[str, dict[str, int]] = {}
    for start in range(0, len(memory) - RECORD + 1, RECORD):
        raw = bytes(memory[start + 8 : start + RECORD]).rstrip(b"\0")
        if not raw:
            continue
        patch, _, event = raw.decode(errors="replace").partition("|")
        (count,) = struct.unpack_from("=Q", memory, start)
        found.setdefault(patch, {})[event] = count
    return found


def write_json(path: str, content: Any) -> None:
    """Write ``content`` so that a reader sees the old file or the new one, never a part."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
    os.replace(temporary, path)


class Receipt:
    """What this process says of itself: role, rank, the plan it works under and the state of each patch."""

    def __init__(self, folder: str | None, digest: str) -> None:
        self.folder = folder
        self.content: dict[str, Any] = {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "host": os.uname().nodename,
            "role": "other",
            "rank": None,
            "digest": digest,
            "program": " ".join(sys.argv[:2]) if getattr(sys, "argv", None) else "",
            "patches": {},
        }

    def update(self, **values: Any) -> None:
        self.content.update(values)
        self.write()

    def state(self, patch: str, **values: Any) -> None:
        """Set the state of one patch in this process (``waiting``, ``applied``, ``failed``) with its details."""
        self.content["patches"].setdefault(patch, {}).update(values)
        self.write()

    def write(self) -> None:
        if self.folder is None:
            return
        if self.content["pid"] != os.getpid():  # a forked child: its own receipt
            self.content.update(pid=os.getpid(), parent=os.getppid())
        write_json(os.path.join(self.folder, f"receipt-{os.getpid()}.json"), self.content)


def read_run(folder: str) -> tuple[list[dict[str, Any]], dict[int, dict[str, dict[str, int]]]]:
    """The receipts of a run, and pid -> patch -> event -> count. Unreadable files are left out."""
    receipts, counters = [], {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        try:
            if name.startswith("receipt-") and name.endswith(".json"):
                with open(path, encoding="utf-8") as file:
                    receipts.append(json.load(file))
            elif name.startswith("counters-") and name.endswith(".bin"):
                with open(path, "rb") as file:
                    counters[int(name[9:-4])] = read_memory(file.read())
        except (OSError, ValueError):
            continue
    return receipts, counters
