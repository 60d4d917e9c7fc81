"""A server that starts, dies, hangs, never gets healthy, or does not want to stop. Small stand-in programs."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from ab_runs.server import Server, ServerError, end_orphan, free_port, group_members, start_time

HEALTHY = """
    import http.server, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def log_message(self, *a): pass
    print("up", flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(folder, code):
    port = free_port()
    made = Server([sys.executable, "-c", textwrap.dedent(code), str(port)], dict(os.environ), folder, port)
    made.start()
    return made


def test_a_healthy_server_is_seen_and_stopped_cleanly(tmp_path):
    made = server(tmp_path, HEALTHY)
    assert made.wait_healthy(20, poll=0.05) > 0
    group = made.process.pid
    stopped = made.stop(10)
    assert stopped["clean"] and stopped["exit_code"] == -15 and not group_members(group)


def test_a_server_that_dies_gives_its_exit_code_and_the_end_of_its_log(tmp_path):
    made = server(tmp_path, "print('first'); raise SystemExit('no such model: x')")
    with pytest.raises(ServerError) as error:
        made.wait_healthy(20, poll=0.05)
    assert error.value.code == "server-died" and "exit code 1" in error.value.detail
    assert "no such model: x" in error.value.tail and "first" in error.value.tail
    assert made.stop(1)["exit_code"] == 1


def test_a_server_that_never_gets_healthy_ends_after_the_timeout_with_its_log(tmp_path):
    made = server(tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    with pytest.raises(ServerError) as error:
        made.wait_healthy(0.8, poll=0.05)
    assert error.value.code == "server-never-healthy" and "loading" in error.value.tail
    assert made.stop(5)["clean"]


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    made = server(
        tmp_path,
        """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(60)"])
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    while "ready" not in made.log.read_text():
        time.sleep(0.05)
    group = made.process.pid
    began = time.monotonic()
    stopped = made.stop(0.5)
    assert not stopped["clean"] and stopped["exit_code"] == -9
    assert not group_members(group) and time.monotonic() - began < 20


def test_a_command_that_does_not_exist_is_a_named_reason(tmp_path):
    made = Server([str(tmp_path / "nothing-here")], {}, tmp_path, 1)
    with pytest.raises(ServerError, match="server-did-not-start.*nothing-here"):
        made.start()
    assert made.stop(1)["exit_code"] is None


def test_the_server_of_a_killed_runner_is_ended_and_a_reused_pid_is_left_alone(tmp_path):
    made = server(tmp_path, "import time; time.sleep(60)")
    group = made.process.pid
    assert end_orphan(tmp_path) is True
    made.process.wait(5)
    assert not group_members(group)
    assert end_orphan(tmp_path) is False  # gone

    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        (tmp_path / "server.json").write_text(f'{{"pid": {other.pid}, "started": 1, "port": 1}}')
        assert end_orphan(tmp_path) is False and other.poll() is None
        assert start_time(other.pid) is not None
        (tmp_path / "server.json").write_text('{"pid": 1')
        assert end_orphan(tmp_path) is False
    finally:
        other.kill()
        other.wait()
