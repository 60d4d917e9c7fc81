"""One server process: started, watched until it is healthy, stopped cleanly.

Whatever it does (dies, hangs, never answers), the caller gets one ``ServerError`` with a named reason and the end of
its log. The server runs in a process group of its own, so that what it leaves behind can be ended with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ab_runs.store import read_json, write_json

TAIL = 40  # lines of the log that an error carries


class ServerError(Exception):
    """A sample's server failed. code: a short fixed reason; detail: what happened; tail: the end of the log."""

    def __init__(self, code: str, detail: str, tail: str = "") -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail, self.tail = code, detail, tail


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def tail(path: Path, lines: int = TAIL) -> str:
    try:
        text = path.read_bytes()[-64 * 1024 :].decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which process ``pid`` began; None where there is none. It tells a reused pid apart."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def group_members(group: int) -> list[int]:
    """Living processes (no zombies) of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def end_group(group: int, patience: float) -> None:
    """SIGTERM to the leader's group, then SIGKILL for what is left after ``patience`` seconds."""
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            if not group_members(group):
                return
            time.sleep(0.1)


class Server:
    """A server under ``folder`` (``server.log``, ``server.json``). Use ``start``, ``wait_healthy``, ``stop``."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path, port: int) -> None:
        self.command, self.env, self.folder, self.port = list(command), dict(env), folder, port
        self.log = folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            try:
                self.process = subprocess.Popen(
                    self.command,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError("server-did-not-start", f"{self.command[0]}: {error.strerror}") from error
        pid = self.process.pid
        write_json(self.folder / "server.json", {"pid": pid, "started": start_time(pid), "port": self.port})

    def check(self) -> None:
        """Raises ServerError where the process has ended."""
        assert self.process is not None
        code = self.process.poll()
        if code is not None:
            raise ServerError("server-died", f"the server ended with exit code {code}", tail(self.log))

    def wait_healthy(self, timeout: float, poll: float = 0.5) -> float:
        """Wait for GET /health; the seconds it took. Raises ServerError: it died, or was not healthy in time."""
        began = time.monotonic()
        while time.monotonic() - began < timeout:
            self.check()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return time.monotonic() - began
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(poll)
        raise ServerError("server-never-healthy", f"no healthy answer within {timeout:.0f} s", tail(self.log))

    def stop(self, patience: float) -> dict[str, Any]:
        """End the server: SIGTERM to it, then SIGKILL to whatever of its group is left. Says how it went.

        Returns {exit_code, clean, seconds}: clean where it ended by itself after SIGTERM and left no process behind.
        """
        if self.process is None:
            return {"exit_code": None, "clean": True, "seconds": 0.0}
        began, group = time.monotonic(), self.process.pid
        clean = True
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                clean = False
        deadline = time.monotonic() + 10
        while clean and group_members(group) and time.monotonic() < deadline:
            time.sleep(0.1)  # children of a server that ended may need a moment
        if group_members(group):
            clean = False
            end_group(group, 5.0)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            clean = False
        return {"exit_code": self.process.returncode, "clean": clean, "seconds": round(time.monotonic() - began, 2)}


def end_orphan(folder: Path) -> bool:
    """End the server that a killed runner left behind in a sample's folder. True where there was one."""
    file = folder / "server.json"
    if not file.exists():
        return False
    try:
        content = read_json(file)
        pid, started = int(content["pid"]), content["started"]
    except Exception:  # a cut-off file names no process that could be ended safely
        return False
    if started is None or start_time(pid) != started:
        return False
    end_group(pid, 20.0)
    return True
