"""`LocalServer`: how it starts and stops, and that nothing of it stays behind.

Most tests start a small script instead of vLLM; those marked `server` run on the real one.
"""

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.server.test_process import wait_for
from trl_april.errors import ConfigError, ServerError
from trl_april.server.local import LocalServer, sees_our_devices
from trl_april.server.process import session_members


HEALTHY = """
    import http.server, sys

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    print("listening", flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

DYING = """
    import sys
    for number in range(100):
        print("line", number)
    print("(EngineCore pid=7) ERROR 11-21 06:24:08 [core.py:1] ValueError: the KV cache is too small")
    for number in range(100, 150):
        print("line", number)
    sys.exit(3)
"""


class ScriptServer(LocalServer):
    """A `LocalServer` that runs a script instead of vLLM."""

    def __init__(self, script: Path, **kwargs):
        self.script = script
        super().__init__("model", **{"log_file": script.with_suffix(".log"), "quiet": True, **kwargs})

    def command(self, port):
        return [sys.executable, str(self.script), str(port), *self.vllm_args]


@pytest.fixture
def script(tmp_path):
    def write(program: str) -> Path:
        path = tmp_path / "fake_vllm.py"
        path.write_text(textwrap.dedent(program))
        return path

    return write


def test_server_runs_for_the_length_of_a_with_block(script, capsys, tmp_path):
    server = ScriptServer(script(HEALTHY), log_file=tmp_path / "logs" / "server.log", quiet=False)
    for early in ("base_url", "pid"):
        with pytest.raises(ServerError, match="Call start.., or use it in a with block"):
            getattr(server, early)
    with server:
        pid = server.pid
        assert server.base_url == f"http://127.0.0.1:{server.port}"
        assert server.is_healthy()
        assert server.start() is server and server.pid == pid  # a second start changes nothing
        assert server.tail(1) == "listening"
        assert server.log_path == tmp_path / "logs" / "server.log"
    assert not session_members(pid)
    assert not server.is_healthy()
    server.stop()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "starting" in lines[0] and "ready after" in lines[1]
    with server:
        assert server.pid != pid and server.is_healthy()


def test_server_is_started_again_by_itself_until_it_no_longer_starts(script, caplog):
    """On its port, without what it left behind; then it is given up with the cause."""
    child = "\n    import subprocess\n    subprocess.Popen(['sleep', '600'])\n"
    with ScriptServer(script(child + HEALTHY), restart=True) as server:
        first, url = server.pid, server.base_url
        wait_for(lambda: len(session_members(first)) == 2)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: server.pid != first)
        assert server.wait().base_url == url and server.is_healthy() and server.failure is None
        assert not session_members(first)
        assert caplog.text.count("was killed by SIGKILL. It is started again") == 1

        second = server.pid
        script(DYING)
        os.kill(second, signal.SIGKILL)
        wait_for(lambda: not server.is_running)
        assert server.log_path.read_text().count("\nline 149") == 3
        assert caplog.text.count("while it was starting. It is started again") == 2
        assert "Root cause: ValueError: the KV cache is too small" in str(server.failure)
        with pytest.raises(ServerError, match="the KV cache is too small"):
            server.wait()
        script(HEALTHY)
        assert server.start().is_healthy() and server.failure is None


def test_server_that_closes_its_port_without_an_exit_is_started_again(script, caplog, monkeypatch):
    """vLLM's API process waits for its clients after the death of its engine."""
    monkeypatch.setattr("trl_april.server.local.CLOSED_SECONDS", 0.3)
    closing = HEALTHY.replace("serve_forever()", "handle_request()\n    import time; time.sleep(600)")
    with ScriptServer(script(closing), restart=True) as server:  # it answers once
        first = server.pid
        script(HEALTHY)
        wait_for(lambda: server.pid != first)
        assert server.wait().is_healthy() and not session_members(first)
    assert caplog.text.count("has closed its port. It is started again") == 1


def test_start_without_waiting(script):
    """An error of the start is raised by `wait`; a server that is stopped meanwhile leaves nothing."""
    server = ScriptServer(script(DYING), restart=True).start(wait=False)
    with pytest.raises(ServerError, match="exit code 3 while it was starting") as error:
        server.wait()
    message = str(error.value)
    assert str(server.log_path) in message and "Root cause: ValueError: the KV cache is too small" in message
    assert "line 149" in message and "line 120" in message and "line 119" not in message  # 30 lines
    assert server.log_path.read_text().count("line 149") == 1, "a first start is not repeated"
    script("import time; time.sleep(600)")
    pid = server.start(wait=False).pid
    assert server.is_running and session_members(pid)
    server.stop()
    assert not session_members(pid)
    for ask in (server.wait, lambda: server.pid):
        with pytest.raises(ServerError, match="is not running"):
            ask()


def test_server_that_does_not_become_healthy_is_stopped(script):
    server = ScriptServer(script("import time; time.sleep(600)"), startup_timeout=0.5)
    with pytest.raises(ServerError, match="startup_timeout=0.5"):
        server.start()
    assert not server.is_running
    with pytest.raises(ConfigError, match="startup_timeout is 0, .*positive"):
        LocalServer("m", startup_timeout=0)


@pytest.mark.parametrize("rank, launched, refused", [("1", True, True), ("0", True, False), ("1", False, False)])
def test_only_the_first_process_of_a_launch_starts_a_server(script, monkeypatch, rank, launched, refused):
    """Only that server would get the weights."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "0")
    server = ScriptServer(script(HEALTHY))
    words = f"process {rank} of 2.*trl-april serve"
    with pytest.raises(ConfigError, match=words) if refused else nullcontext():
        server.start().stop()


@pytest.mark.parametrize(("env", "ours"), [({"OMP_NUM_THREADS": "1"}, True), ({"CUDA_VISIBLE_DEVICES": "1"}, False)])
def test_server_sees_our_devices_unless_told_otherwise(script, env, ours):
    with ScriptServer(script(HEALTHY), env=env) as server:
        assert sees_our_devices(server.base_url) is ours
    assert not sees_our_devices(server.base_url)


OWNER = """
    import os, sys, time
    from pathlib import Path
    from tests.server.test_local import ScriptServer

    server = ScriptServer(Path({script!r}), restart=True).start()
    print(server.pid, flush=True)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("the fork has ended", flush=True)
        {after}
"""


@pytest.mark.parametrize("after", ["raise RuntimeError", "time.sleep(600)"], ids=["ends", "killed"])
def test_end_of_the_owner_stops_the_server_and_that_of_its_fork_does_not(script, after):
    program = textwrap.dedent(OWNER).format(script=str(script(HEALTHY)), after=after)
    command, pipes = [sys.executable, "-c", program], {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], text=True, **pipes) as process:
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "the fork has ended\n"
        if "sleep" in after:
            assert session_members(pid)
            process.kill()
        process.communicate(timeout=60)
    wait_for(lambda: not session_members(pid))
