"""What the device is known to hold of a ``CpuGpuBuffer``, byte for byte.

A buffer is *enrolled* by giving it a ``Held``. The content counts only while the device tensor is the one that was
copied to and its version counter says that no PyTorch operation wrote it since. A kernel that writes the tensor
behind PyTorch's back must call ``forget``.
"""

from __future__ import annotations

from typing import Any

_NAME = "_overlay_held"


class Held:
    """raw: the bytes of the device's first rows. device: the tensor they are in. version: its counter then."""

    __slots__ = ("device", "raw", "version")

    def __init__(self) -> None:
        self.raw = b""
        self.device: Any = None
        self.version = -1

    def has(self, raw: bytes, device: Any) -> bool:
        """Whether ``device`` begins with exactly these bytes."""
        return self.device is device and self.version == device._version and self.raw.startswith(raw)

    def copied(self, raw: bytes, device: Any, before: int) -> None:
        """``raw`` was just copied to the front of ``device``, whose counter stood at ``before`` until then."""
        if self.device is device and self.version == before:
            self.raw = raw + self.raw[len(raw) :]
        else:
            self.raw = raw
        self.device = device
        self.version = device._version


def enrol(buffer: Any) -> bool:
    """Start to keep account of ``buffer``; False where that cannot be done (no NumPy view, no version counter)."""
    if getattr(buffer, "np", None) is None or buffer.gpu.is_inference():
        return False
    buffer.__dict__[_NAME] = Held()
    return True


def held(buffer: Any) -> Held | None:
    """The account of an enrolled buffer."""
    return buffer.__dict__.get(_NAME)


def forget(buffer: Any) -> None:
    """A kernel wrote the device tensor of ``buffer``."""
    account = buffer.__dict__.get(_NAME)
    if account is not None:
        account.raw = b""
