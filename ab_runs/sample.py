"""One sample: a boot, its warm-up, its measured load, its answers, its clean end, and what was seen on the way."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ab_runs import answers, client, load, machine, plans
from ab_runs.plans import Plan
from ab_runs.schedule import Slot
from ab_runs.server import Server, ServerError, end_group, free_port, tail
from ab_runs.spec import Spec
from ab_runs.store import write_json
from overlay import ledger

Progress = Callable[[str], None]

# Lines by which vLLM says that it compiles: its JIT monitor (0.23 and later), its compilation backend, graph capture.
_COMPILING = re.compile(
    r"during inference: |JIT compilation during|Compiling a graph for|torch\.compile takes|Capturing CUDA graphs"
)
_ENGINE = re.compile(r"Initializing a V1 LLM engine \(v(?P<version>.*?)\) with config: (?P<config>.*)")
_SIZES = re.compile(r"'cudagraph_capture_sizes': \[([\d, ]*)\]")


def engine_settings(log: str, hide: str = "") -> dict[str, Any]:
    """What the engine says of its own configuration at start: the effective settings, after all defaults.

    hide: a path that differs between boots by design (the run's folder), replaced by ``RUN``. Empty where the build's
    log has no such line.
    """
    match = _ENGINE.search(log)
    if not match:
        return {}
    text = match["config"].replace(hide, "RUN") if hide else match["config"]
    sizes = _SIZES.search(text)
    found: dict[str, Any] = {"version": match["version"]}
    found |= dict(_top_level(text))
    if sizes:
        found["capture_sizes"] = [int(size) for size in sizes[1].split(",") if size.strip()]
    return found


def _top_level(text: str) -> list[tuple[str, str]]:
    """``a=1, b=F(x, y), c={...}`` as pairs: commas inside brackets or quotes separate nothing."""
    parts, depth, quote, start = [], 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and text[at - 1] != "\\" else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [(key.strip(), value.strip()) for key, eq, value in (part.partition("=") for part in parts) if eq]


def cache_files(folder: Path) -> set[str]:
    """Names of the files in an arm's compile caches: a new one means that something was compiled."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} if folder.exists() else set()


def counted(run_dir: Path) -> dict[tuple[int, str, str], int]:
    """(pid, patch, event) -> count, from the counter files of a run."""
    if not run_dir.exists():
        return {}
    _, counters = ledger.read_run(str(run_dir))
    return {
        (pid, patch, event): count
        for pid, patches in counters.items()
        for patch, events in patches.items()
        for event, count in events.items()
    }


def risen(before: Mapping[Any, int], after: Mapping[Any, int]) -> dict[str, dict[str, int]]:
    """patch -> event -> how much it rose over all processes; events that did not rise are left out."""
    total: dict[str, dict[str, int]] = {}
    for (pid, patch, event), count in after.items():
        rise = count - before.get((pid, patch, event), 0)
        if rise > 0:
            events = total.setdefault(patch, {})
            events[event] = events.get(event, 0) + rise
    return total


class Sample:
    """The measurement of one slot. ``measure`` never raises for what a server or a load may do; it records it."""

    def __init__(
        self, spec: Spec, plan: Plan, slot: Slot, folder: Path, caches: Path, answer: bool, score: bool, say: Progress
    ) -> None:
        self.spec, self.plan, self.slot, self.folder, self.caches = spec, plan, slot, folder, caches
        self.answer, self.score, self.say = answer, score, say
        self.run_dir = folder / "overlay"
        self.record: dict[str, Any] = {"index": slot.index, "arm": slot.arm, "block": slot.block, "notes": []}
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def _timed(self, what: str) -> Any:
        began = time.monotonic()
        self.say(what)
        try:
            yield
        finally:
            self.seconds[what] = round(time.monotonic() - began, 2)

    def measure(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Run it. facts: what identifies the machine, kept with the sample. Returns the record of ``sample.json``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run_dir.mkdir(exist_ok=True)
        self.caches.mkdir(parents=True, exist_ok=True)
        port = free_port()
        arm = self.spec.arms[self.slot.arm]
        command = plans.serve_command(self.spec, arm, port, self.run_dir, plans.known_to(self.plan))
        server = Server(command, plans.environment(self.spec, self.caches), self.folder, port)
        self.record |= {"command": command, "machine": dict(facts), "state_before": machine.state()}
        try:
            self._through(server)
            self.record["status"] = "ok"
        except ServerError as error:
            self._failed(error.code, error.detail, error.tail)
        except client.CallError as error:
            code = "server-died" if server.process and server.process.poll() is not None else "call-failed"
            self._failed(code, str(error), tail(server.log))
        finally:
            with self._timed("stop"):
                self.record["stop"] = server.stop(self.spec.server.stop_timeout)
        self.record |= {"state_after": machine.state(), "seconds": self.seconds}
        return self.record

    def _failed(self, code: str, detail: str, log: str) -> None:
        self.record |= {"status": "failed", "reason": {"code": code, "detail": detail, "log": log}}

    def _through(self, server: Server) -> None:
        settings = self.spec.server
        with self._timed("boot"):
            server.start()
            server.wait_healthy(settings.start_timeout)
        log = server.log.read_text(encoding="utf-8", errors="replace")
        run_folder = str(self.caches.parent.parent)
        self.record["engine"] = engine_settings(log, run_folder)
        served = client.served_model(server.url)
        with self._timed("warm-up"):
            vocabulary = self.plan.fact("model.vocab_size")
            load.warm_up(server.url, served, self.spec.workload, self.spec.seed, vocabulary, settings.load_timeout)
        before = self._look(server)
        with self._timed("load"):
            self._load(server, served)
        self.record["window"] = self._compare(before, self._look(server), server)
        server.check()
        if self.answer:
            with self._timed("answers"):
                found = answers.ask(server.url, served, self.spec.exactness)
                write_json(self.folder / "answers.json", found)
        if self.score:
            with self._timed("quality"):
                try:
                    write_json(self.folder / "quality.json", answers.quality(server.url, served))
                except client.CallError as error:  # some servers cannot score prompts; the comparison goes on
                    server.check()
                    self.record["notes"].append(f"no quality figure: {error}")
        self.record["receipts"] = ledger.read_run(str(self.run_dir))[0]

    def _look(self, server: Server) -> dict[str, Any]:
        return {
            "counters": counted(self.run_dir),
            "metrics": client.metrics(server.url),
            "cache": cache_files(self.caches),
            "log": server.log.stat().st_size,
        }

    def _compare(self, before: dict[str, Any], after: dict[str, Any], server: Server) -> dict[str, Any]:
        """What happened between two looks: the measured window."""
        with server.log.open("rb") as file:
            file.seek(before["log"])
            lines = file.read(after["log"] - before["log"]).decode(errors="replace").splitlines()

        def rise(name: str) -> float:
            return after["metrics"].get(name, 0.0) - before["metrics"].get(name, 0.0)

        return {
            "counters": risen(before["counters"], after["counters"]),
            "prefix_cache": {
                "queries": rise("vllm:prefix_cache_queries") + rise("vllm:external_prefix_cache_queries"),
                "hits": rise("vllm:prefix_cache_hits") + rise("vllm:external_prefix_cache_hits"),
            },
            "new_cache_files": sorted(after["cache"] - before["cache"])[:20],
            "compile_lines": [line.strip()[:300] for line in lines if _COMPILING.search(line)][:20],
            "preemptions": rise("vllm:num_preemptions"),
        }

    def _load(self, server: Server, served: str) -> None:
        """``vllm bench serve`` in a process group of its own. Raises ServerError where it fails or does not end."""
        root = self.plan.fact("build.root")
        flags = load.bench_flags(
            self.spec.workload,
            model=self.spec.model,
            served=served,
            port=server.port,
            seed=self.spec.seed,
            folder=self.folder,
            ratios=load.two_ratios(Path(root) if root else None),
            serve=self.spec.serve_flags,
        )
        command = plans.client_command(self.spec, flags)
        self.record["client"] = command
        log = self.folder / "client.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                env=plans.environment(self.spec),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = self._wait(process, server)
            finally:
                if process.poll() is None:
                    end_group(process.pid, 5.0)
                    process.wait()
        server.check()
        if code:
            raise ServerError("load-failed", f"vllm bench serve ended with exit code {code}", tail(log))
        if not (self.folder / "bench.json").exists():
            raise ServerError("load-failed", "vllm bench serve wrote no bench.json", tail(log))

    def _wait(self, process: subprocess.Popen[bytes], server: Server) -> int:
        deadline = time.monotonic() + self.spec.server.load_timeout
        while time.monotonic() < deadline:
            try:
                return process.wait(1.0)
            except subprocess.TimeoutExpired:
                server.check()
        raise ServerError(
            "load-timeout",
            f"the load did not end within {self.spec.server.load_timeout} s",
            f"{tail(self.folder / 'client.log', 15)}\n--- server ---\n{tail(server.log)}",
        )


def identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for two boots to be comparable, from ``machine.record``."""
    cpu = record.get("cpu") or {}
    return {
        "cpu": cpu.get("model"),
        "cores": cpu.get("usable_cores"),
        "governor": cpu.get("governor"),
        "system": record.get("system"),
        "python": record.get("python"),
        "libraries": record.get("libraries"),
        "omp": os.environ.get("OMP_NUM_THREADS"),
    }
