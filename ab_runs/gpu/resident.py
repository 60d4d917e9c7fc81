"""An engine that stays resident while others are measured: a process that answers one measurement a line.

The program behind it prints ``IMPORTED {}`` when it has imported what it needs and waits for ``go``; it prints ``READY`` with a
JSON object when its engine is built. For a line ``BATCH TOKENS`` it prints ``TIME`` with a JSON object. It ends at ``quit`` and
with its stdin.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from ab_runs.gpu import arms


class Resident:
    """One engine of one boot: its processes, its times by batch size, and what it proved."""

    def __init__(
        self,
        model: str,
        arm: str,
        place: tuple[int, int],
        program: list[str],
        work: Path,
        tables: Path | None = None,
        boot_limit: float = 300,
        ranks: int = 1,
    ) -> None:
        """place: the number of its pass through the plan and of its wave, both from 1. work: the folder for logs, caches and
        receipts. boot_limit: seconds until the engine must be ready. ranks: its worker processes.
        """
        self.model, self.arm, self.place = model, arm, place
        self.name = f"{model} {arm} wave {place[1]}"
        self.program, self.tables, self.boot_limit, self.ranks = program, tables, boot_limit, ranks
        self.times: dict[int, list[dict[str, Any]]] = {}
        self.ready: dict[str, Any] = {}
        self.boot_s: float | None = None
        self.problems: list[str] = []
        self.proof: dict[str, Any] | None = None
        slug = f"{model}-{arm}".replace("+", "-")
        self.run = work / "runs" / f"{slug}-{place[1]}"
        self.log = work / f"{slug}-{place[1]}.log"
        # compile caches of its own, kept over boots
        self.caches = {
            "VLLM_CACHE_ROOT": str(work / f"cache-{slug}"),
            "TORCHINDUCTOR_CACHE_DIR": str(work / f"inductor-{slug}"),
        }
        self.process: subprocess.Popen[str] | None = None
        self.imported = self.over = False

    def start(self) -> None:
        """Start the process: it imports what it needs and waits."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self.process = subprocess.Popen(
            arms.command(self.arm, self.program, self.run, self.tables),
            env=arms.environment(self.ranks, **self.caches),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("a"),
            text=True,
            bufsize=1,
            start_new_session=True,  # so that its engine and worker processes can be ended with it
        )

    def tell(self, line: str) -> None:
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it ended: the next answer says so

    def answer(self, word: str, seconds: float) -> dict[str, Any] | None:
        """What it says behind ``word``; None where it ended, or was killed for not answering in time."""
        answered = threading.Event()
        watch = threading.Thread(target=self._watch, args=(time.monotonic() + seconds, answered), daemon=True)
        watch.start()
        try:
            with self.log.open("a") as log:  # vLLM logs to stdout
                for line in self.process.stdout:
                    if line.startswith(word + " "):
                        return json.loads(line[len(word) :])
                    log.write(line)
        finally:
            answered.set()
            watch.join()
        code = self.process.wait()
        said = self.log.read_text(errors="replace").strip()[-2000:]
        self.problems.append(f"no {word}: it ended with {code}; the end of its log: {said}")
        return None

    def _watch(self, end: float, answered: threading.Event) -> None:
        """Kill it at ``end``, and what is left of it once its main process is gone: that would keep its stdout open."""
        while not answered.wait(1):
            if time.monotonic() > end:
                self.problems.append("killed for not answering in time")
            elif self.process.poll() is None:
                continue
            self.kill()
            return

    def wait_imported(self) -> None:
        if not self.imported:
            self.imported = True
            self.answer("IMPORTED", 240)

    def go(self) -> None:
        """Build the engine."""
        self.began = time.monotonic()
        self.tell("go")

    def wait_ready(self) -> bool:
        if self.process.poll() is not None and self.problems:
            return False
        self.ready = self.answer("READY", self.boot_limit) or {}
        self.boot_s = time.monotonic() - self.began
        if self.ready and self.ready["launched"] != (arms.ARMS[self.arm] is not None):
            self.problems.append(f"started {'with' if self.ready['launched'] else 'without'} a plan in its environment")
        return bool(self.ready)

    def measure(self, batch: int, tokens: int) -> None:
        if self.process.poll() is not None:
            return
        self.tell(f"{batch} {tokens}")
        if (found := self.answer("TIME", 120)) is not None:
            self.times.setdefault(batch, []).append(found)

    def prove(self) -> None:
        """Read what its processes said of themselves: anew at each call, since the counters go on."""
        before = set((self.proof or {}).get("problems", ()))
        self.proof = arms.proof(self.arm, self.run, self.ranks)
        self.problems = [p for p in self.problems if p not in before] + self.proof["problems"]

    def end(self) -> None:
        """End it and its other processes, and wait until they are gone: the next engine needs their memory."""
        if self.process is None or self.over:
            return
        self.over = True
        self.tell("quit")
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (subprocess.TimeoutExpired, OSError):
            pass
        self.kill()
        self.process.wait()
        for _ in range(100):
            if not self.kill():
                break
            time.sleep(0.1)
        self.process.stdout.close()

    def kill(self) -> bool:
        """Kill it with its other processes. Whether there was anything left to kill."""
        if self.process is None:
            return False
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def record(self) -> dict[str, Any]:
        return {
            "name": self.name, "model": self.model, "arm": self.arm, "pass": self.place[0], "wave": self.place[1],
            "boot_s": self.boot_s,
            "problems": self.problems, "proof": self.proof, "ready": self.ready, "times": self.times,
        }  # fmt: skip
