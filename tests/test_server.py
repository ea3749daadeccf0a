"""`LocalServer`: the command it builds, what it refuses, how it starts and dies, and that nothing of it stays behind.

Most tests start a small script in the place of vLLM; those marked `server` run on the real one.
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from contextlib import nullcontext
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from trl_april import process_session
from trl_april.browser_guard import BrowserGuard
from trl_april.engine import Chunk, GenerationRequest
from trl_april.errors import AprilError, ConfigError, ServerError
from trl_april.generated_tokens import GeneratedTokens
from trl_april.process_session import end_session, session_members, start_watchdog
from trl_april.sampling import SamplingOptions
from trl_april.server import LocalServer, run_in_foreground, sees_our_devices
from trl_april.server_address import bind
from trl_april.server_command import flag_name, flag_value, server_command, server_environment
from trl_april.vllm_engine import VLLMEngine


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

# Deaf to SIGTERM, with a child that is deaf too.
STUBBORN = """
    import signal, subprocess, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True)"
    subprocess.Popen([sys.executable, "-c", child + "; time.sleep(600)"])
"""

DYING = """
    import sys
    for number in range(100):
        print("line", number)
    print("(APIServer pid=6) WARNING 11-21 06:23:46 [x.py:2] Expect errors like `OSError: [Errno 24] Too many`.")
    print("(EngineCore pid=7) ERROR 11-21 06:24:08 [core.py:1]     raise ValueError(")
    print("(EngineCore pid=7) ERROR 11-21 06:24:08 [core.py:1] ValueError: the KV cache is too small")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    for number in range(100, 150):
        print("line", number)
    sys.exit(3)
"""


class ScriptServer(LocalServer):
    """A `LocalServer` that runs a script in vLLM's place."""

    def __init__(self, script: Path, **kwargs):
        self.script = script
        kwargs.setdefault("log_file", script.with_suffix(".log"))
        super().__init__("model", **kwargs)

    def command(self, port):
        return [sys.executable, str(self.script), str(port), *self.vllm_args]


@pytest.fixture
def script(tmp_path):
    def write(*parts: str) -> Path:
        path = tmp_path / "fake_vllm.py"
        path.write_text("".join(textwrap.dedent(part) for part in parts))
        return path

    return write


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


# The command line and the environment


def flag_values(command: list[str], flag: str) -> list[str]:
    return [value for name, value in itertools.pairwise(command) if name == flag]


def test_command_on_a_cpu():
    command = server_command("dir/model", "127.0.0.1", 8123, ["--max-model-len", "4096"], platform="cpu")
    assert command[:4] == [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in {
        "--model": "dir/model",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": "-1",
        "--generation-config": "vllm",
        "--max-model-len": "4096",
    }.items():
        assert flag_value(command, flag) == value
    assert "--disable-uvicorn-access-log" in command
    assert flag_values(command, "--middleware") == [
        f"{middleware.__module__}.{middleware.__name__}" for middleware in (GeneratedTokens, BrowserGuard)
    ]
    let_in = server_command("m", "127.0.0.1", 1, ["--allowed-origins", '["*"]'], platform="cpu")
    assert len(flag_values(let_in, "--middleware")) == 1
    assert "--weight-transfer-config" not in command  # there is no NCCL on a CPU


@pytest.mark.parametrize("release, scale_out", [("0.22.1", False), ("0.30.0", True), ("0.31.0+cu130", True)])
def test_command_on_a_gpu(monkeypatch, release, scale_out):
    monkeypatch.setattr("trl_april.server_command.version", lambda name: release)
    command = server_command("m", "127.0.0.1", 1, platform="gpu")
    assert json.loads(flag_value(command, "--weight-transfer-config")) == {"backend": "nccl"}
    assert ("--enable-scale-out" in command) == scale_out
    for own in (["--weight-transfer-config", '{"backend": "ipc"}'], ["--weight_transfer_config.backend=ipc"]):
        assert '{"backend": "nccl"}' not in server_command("m", "127.0.0.1", 1, own, platform="gpu")


def test_a_flag_of_the_user_wins_over_a_default():
    command = server_command("m", "h", 1, ["--generation-config", "auto", "--max_logprobs=5"], platform="cpu")
    assert flag_value(command, "--generation-config") == "auto"
    assert flag_value(command, "--max-logprobs") == "5"


def test_nothing_wins_over_what_training_needs():
    # vLLM's parser takes abbreviations, which is why the order decides and not a comparison of names.
    command = server_command("m", "h", 1, ["--logprobs-mod", "raw_logprobs"], platform="cpu")
    assert command.index("--logprobs-mod") < command.index("--logprobs-mode")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--logprobs-mode", "raw_logprobs"], ["raw_logprobs", "processed_logprobs", "Leave the flag out"]),
        (["--logprobs_mode=raw_logits"], ["raw_logits", "processed_logprobs"]),
        (["--port", "8000"], ["--port", "argument `port`"]),
        (["--host=0.0.0.0"], ["--host", "argument `host`"]),
        (["--model", "other"], ["--model", "first argument"]),
        (["--uds", "/tmp/socket"], ["--uds", "leave it out"]),
        (["--tokens-only"], ["--tokens-only", "leave it out"]),
        (["--skip-tokenizer-init"], ["--skip-tokenizer-init", "tokenizer"]),
        ("--dtype float32", ["--dtype float32", "one entry per word", "['--dtype', 'float32']"]),
    ],
)
def test_flags_that_make_training_impossible_are_refused(arguments, words):
    with pytest.raises(ConfigError) as error:
        LocalServer("m", vllm_args=arguments)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"port": 0}, ["0", "1 to 65535"]),
        ({"port": 70000}, ["70000", "1 to 65535"]),
        ({"port": "8000"}, ["'8000'", "whole number"]),
        ({"port": True}, ["True", "whole number"]),
        ({"host": "http://localhost"}, ["http://localhost", "host name"]),
        ({"host": ""}, ["''", "host name"]),
        ({"host": "--help"}, ["--help", "host name"]),
        ({"host": "no-such-host.invalid"}, ["no-such-host.invalid", "does not resolve"]),
        ({"host": "192.0.2.1"}, ["192.0.2.1", "cannot bind"]),
        ({"startup_timeout": 0}, ["startup_timeout", "positive"]),
        ({"env": {"VLLM_SERVER_DEV_MODE": "0"}}, ["VLLM_SERVER_DEV_MODE", "'0'", "Leave it out"]),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, words):
    with pytest.raises(ConfigError) as error:
        LocalServer("m", **options)
    for word in words:
        assert word in str(error.value)


def test_a_port_in_use_is_refused_because_a_stranger_would_answer():
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        with pytest.raises(ConfigError, match="another port"):
            LocalServer("m", port=stranger.getsockname()[1])


def test_a_name_stands_for_its_ipv4_address_as_for_vllm(monkeypatch):
    """Or a stranger who listens there would answer in the server's place."""
    resolve = socket.getaddrinfo

    def both(host, port, family=0, *rest, **options):
        found = resolve("127.0.0.1" if host == "localhost" else host, port, family, *rest, **options)
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
        return [six, *found] if host == "localhost" and family == 0 else found

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        with pytest.raises(ConfigError, match="cannot bind to localhost"):
            bind("localhost", stranger.getsockname()[1])


def test_vllm_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trl-april\[cpu\]"):
        LocalServer("m")


@pytest.mark.parametrize("rank, launched, refused", [("1", True, True), ("0", True, False), ("1", False, False)])
def test_of_several_processes_only_the_first_has_a_server(script, monkeypatch, rank, launched, refused):
    """The weights would go to that of the first alone."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "0")
    server = ScriptServer(script(HEALTHY), quiet=True)
    said = f"process {rank} of 2.*trl-april serve"
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        server.start().stop()


def test_environment(monkeypatch):
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    env = server_environment({"A": "b"}, platform="cpu")
    assert env["A"] == "b"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert env["PATH"] == os.environ["PATH"]
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"} & env.keys()

    assert server_environment({"VLLM_CPU_KVCACHE_SPACE": "8"}, platform="cpu")["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_environment(platform="gpu")
    # vLLM lets the variable override the flag, so it must not be there beside it.
    flags = ["--kv-cache-memory-bytes=2000000000"]
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_environment(None, flags, platform="cpu")


@pytest.mark.parametrize(
    ("platform", "cores", "given", "expected"),
    [
        ("cpu", 1, {}, ("0", "1")),
        ("cpu", 2, {}, ("0", "1")),
        ("cpu", 3, {}, ("0", "2")),
        ("cpu", 2, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "2"}, ("1", "2")),
        ("cpu", 4, {}, (None, None)),
        ("gpu", 2, {}, (None, None)),
    ],
)
def test_on_a_cpu_with_few_cores_the_model_runs_in_the_schedulers_process(
    monkeypatch, platform, cores, given, expected
):
    for variable in ("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    env = server_environment(given, platform=platform)
    assert (env.get("VLLM_ENABLE_V1_MULTIPROCESSING"), env.get("OMP_NUM_THREADS")) == expected


def test_flags_are_read_as_vllm_reads_them():
    assert flag_name("--logprobs_mode=x") == "--logprobs-mode"
    assert flag_name("--weight-transfer-config.backend") == "--weight-transfer-config"
    assert flag_name("-1") is None and flag_name("value") is None
    assert flag_value(["--a", "1", "--a=2"], "--a") == "2"
    assert flag_value(["--a"], "--a") == ""
    assert flag_value(["--b", "1"], "--a") is None


# Start and end


def test_round_trip(script, capsys, tmp_path):
    server = ScriptServer(script(HEALTHY), log_file=tmp_path / "logs" / "server.log")
    for early in ("base_url", "pid", "log_path"):
        with pytest.raises(ServerError, match="start"):
            getattr(server, early)
    with server:
        pid = server.pid
        assert server.base_url == f"http://127.0.0.1:{server.port}"
        assert server.is_healthy()
        assert server.start() is server and server.pid == pid  # a second start changes nothing
        assert server.tail(1) == "listening"
        assert server.log_path == tmp_path / "logs" / "server.log"
        assert session_members(pid)
    assert not session_members(pid)
    assert not server.is_healthy()
    server.stop()  # a second stop neither
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "starting" in lines[0] and "ready after" in lines[1]


def test_a_server_can_be_started_again(script):
    server = ScriptServer(script(HEALTHY), quiet=True)
    with server:
        first = server.pid
    with server:
        assert server.pid != first and server.is_healthy()


def test_one_that_has_died_is_started_again(script):
    server = ScriptServer(script(HEALTHY), quiet=True)
    with server:
        first = server.pid
        assert server.start().pid == first
        os.kill(first, signal.SIGKILL)
        server._process.wait(20)
        assert server.start().pid != first and server.is_healthy()


def test_the_first_error_is_that_of_this_start(script):
    server = ScriptServer(script(DYING), quiet=True)
    with pytest.raises(ServerError, match="first error: ValueError: the KV cache is too small"):
        server.start()
    script(DYING.replace("KV cache is too small", "model is of another kind"))
    with pytest.raises(ServerError, match="first error: ValueError: the model is of another kind"):
        server.start()
    assert "KV cache" in server.log_path.read_text()


@pytest.mark.parametrize(
    ("env", "ours"),
    [(None, True), ({"OMP_NUM_THREADS": "1"}, True), ({"CUDA_VISIBLE_DEVICES": "1"}, False)],
)
def test_whether_it_has_the_devices_of_this_process(script, env, ours):
    server = ScriptServer(script(HEALTHY), quiet=True, env=env)
    with server:
        assert sees_our_devices(server.base_url) is ours
    assert not sees_our_devices(server.base_url)
    assert not sees_our_devices("http://127.0.0.1:8000")


def test_keys_are_not_shown(script):
    secret = ["--api-key", "sk-one", "sk-two", "--hf-token=hf-three", "--seed", "3"]
    server = ScriptServer(script(DYING), quiet=True, vllm_args=secret)
    with pytest.raises(ServerError) as error:
        server.start()
    shown = server.log_path.read_text()
    for key in ("sk-one", "sk-two", "hf-three"):
        assert key not in shown and key not in str(error.value)
    assert "--api-key '***' '***' '--hf-token=***' --seed 3" in shown


def test_quiet_means_silent(script, capsys):
    with ScriptServer(script(HEALTHY), quiet=True):
        pass
    assert capsys.readouterr().err == ""


def test_a_server_that_dies_while_starting_shows_its_log(script):
    server = ScriptServer(script(DYING), quiet=True)
    with pytest.raises(ServerError) as error:
        server.start()
    message = str(error.value)
    assert isinstance(error.value, AprilError) and isinstance(error.value, ConnectionError)
    assert "exit code 3" in message and str(server.log_path) in message
    assert "first error: ValueError: the KV cache is too small" in message
    assert "line 149" in message and "line 120" in message and "line 119" not in message  # 30 lines
    with pytest.raises(ServerError, match="does not run"):
        server.pid  # noqa: B018


def test_a_server_that_does_not_become_healthy_is_stopped(script, monkeypatch):
    server = ScriptServer(script(STUBBORN, "import time; time.sleep(600)"), quiet=True, startup_timeout=1.0)
    monkeypatch.setattr("trl_april.server.GRACE", 0.2)
    with pytest.raises(ServerError, match="startup_timeout=1.0"):
        server.start()
    assert not server.is_healthy()


def test_processes_that_ignore_sigterm_are_gone_after_stop(script, monkeypatch):
    monkeypatch.setattr("trl_april.server.GRACE", 0.5)
    with ScriptServer(script(STUBBORN, HEALTHY), quiet=True) as server:
        pid = server.pid
        wait_for(lambda: "child" in server.tail())
        assert len(session_members(pid)) == 2
    assert not session_members(pid)


def test_an_orphan_of_a_dead_server_is_stopped_too(script, monkeypatch):
    monkeypatch.setattr("trl_april.server.GRACE", 0.5)
    with ScriptServer(script(STUBBORN, HEALTHY), quiet=True) as server:
        pid = server.pid
        wait_for(lambda: "child" in server.tail())
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(session_members(pid)) == 1)
    assert not session_members(pid)


def test_an_exception_in_the_block_stops_the_server(script):
    server = ScriptServer(script(HEALTHY), quiet=True)
    with pytest.raises(ZeroDivisionError), server:
        pid = server.pid
        1 / 0  # noqa: B018
    assert not session_members(pid)


OWNER = """
    import os, sys, time
    sys.path[:0] = [{tests!r}, {root!r}]
    from pathlib import Path
    from test_server import ScriptServer

    server = ScriptServer(Path({script!r}), quiet=True).start()
    print(server.pid, flush=True)
    {after}
"""


@pytest.fixture
def owner(script, tmp_path):
    """Starts a process that owns a server and then does `after`. Returns it with the server's pid."""

    def start(after: str) -> tuple[subprocess.Popen, int]:
        tests = Path(__file__).parent
        program = textwrap.dedent(OWNER).format(
            tests=str(tests), root=str(tests.parent), script=str(script(HEALTHY)), after=after
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        return process, int(process.stdout.readline())

    return start


@pytest.mark.parametrize("after", ["", "sys.exit(1)", "raise RuntimeError"])
def test_the_end_of_the_interpreter_stops_the_server(owner, after):
    process, pid = owner(after)
    process.communicate(timeout=30)
    assert not session_members(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_owner_leaves_no_server(owner, number):
    process, pid = owner("time.sleep(600)")
    assert session_members(pid)
    process.send_signal(number)
    process.communicate(timeout=30)
    wait_for(lambda: not session_members(pid))


def test_a_fork_of_the_owner_does_not_stop_the_server(owner):
    process, pid = owner(
        "child = os.fork()\nif child: os.waitpid(child, 0); print('the fork has ended', flush=True); time.sleep(600)"
    )
    assert process.stdout.readline() == "the fork has ended\n"
    assert session_members(pid)
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not session_members(pid))


def test_the_watchdog_ends_with_the_server(script):
    others = {child.pid for child in psutil.Process().children()}  # the test run's own server, if it is up already
    with ScriptServer(script(HEALTHY), quiet=True) as server:
        children = {child.pid for child in psutil.Process().children()} - others
        assert server.pid in children and len(children) == 2
    left = {child.pid for child in psutil.Process().children()} & children
    assert not left


def test_a_session_has_not_ended_before_its_last_thread():
    """A process whose first thread has ended looks like a zombie and still holds its port, as a killed one may."""
    script = """
import ctypes, socket, threading, time
held = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: (print(held.getsockname()[1], flush=True), time.sleep(600))).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        port = int(process.stdout.readline())
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert [member.pid for member in session_members(process.pid)] == [process.pid]
        assert end_session(process.pid, 0.0) == []
        socket.create_server(("127.0.0.1", port)).close()
    finally:
        process.kill()
        process.communicate()


def test_end_of_a_session_that_is_gone():
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    assert end_session(process.pid, grace=5.0) == []


HOARDER = """
    import signal, sys, time
    from multiprocessing import shared_memory
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    block = shared_memory.SharedMemory(create=True, size=1024)
    print(block.name, flush=True)
    time.sleep(600)
"""


def test_shared_memory_of_a_killed_server_is_freed(monkeypatch):
    monkeypatch.setattr(process_session, "TRACKER_WAIT", 30.0)  # of a busy machine
    monkeypatch.setattr(process_session, "KILL_WAIT", 40.0)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOARDER)], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    name = process.stdout.readline().strip()
    wait_for(lambda: len(session_members(process.pid)) == 2)  # with the resource tracker
    assert end_session(process.pid, grace=0.2) == []
    process.communicate()
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(name=name)


def test_a_process_that_left_the_session_is_found_through_its_parent():
    program = "import subprocess, sys; subprocess.run(['sleep', '600'], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    wait_for(lambda: len(session_members(process.pid)) == 2)
    members = session_members(process.pid)
    end_session(process.pid, grace=5.0)
    process.wait()
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in members)


# Runs the watchdog, and leaves a mark whenever it has found its owner alive.
MARKING = """
    import runpy, time
    from pathlib import Path

    def sleep_and_mark(seconds, sleep=time.sleep):
        with Path({marks!r}).open("a") as marks:
            marks.write("alive\\n")
        sleep(seconds)

    time.sleep = sleep_and_mark
    runpy.run_path({watchdog!r}, run_name="__main__")
"""


def test_the_watchdog_does_nothing_while_its_owner_lives(tmp_path, monkeypatch):
    marks, marking = tmp_path / "marks", tmp_path / "marking.py"
    marking.write_text(textwrap.dedent(MARKING).format(marks=str(marks), watchdog=process_session.__file__))
    monkeypatch.setattr(process_session, "__file__", str(marking))
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    watchdog = start_watchdog(process.pid, grace=1.0)
    try:
        wait_for(lambda: watchdog.poll() is not None or marks.exists() and marks.read_text().count("alive") >= 2)
        assert process.poll() is None and watchdog.poll() is None
    finally:
        watchdog.kill()
        watchdog.wait()
        process.kill()
        process.wait()


# In the foreground


def test_foreground_returns_the_exit_code():
    assert run_in_foreground([sys.executable, "-c", "raise SystemExit(3)"], os.environ) == 3
    assert run_in_foreground([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], os.environ) == 137


@pytest.mark.parametrize("ignored", [False, True])
def test_foreground_leaves_a_signal_alone_that_is_ignored(ignored):
    """`nohup` starts a program so, to survive the terminal."""
    program = textwrap.dedent(f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from trl_april.server import run_in_foreground
        if {ignored}: signal.signal(signal.SIGHUP, signal.SIG_IGN)
        told = "import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep({1 if ignored else 60})"
        told += "; raise SystemExit(3)"
        raise SystemExit(run_in_foreground([sys.executable, "-c", told], os.environ))
    """)
    process = subprocess.run([sys.executable, "-c", program], timeout=60)
    assert (process.returncode == 3) is ignored  # it has come to its own end


# The real server


@pytest.mark.server
def test_real_server_has_what_training_needs(server):
    with urllib.request.urlopen(f"{server.base_url}/server_info?config_format=json", timeout=30) as answer:
        model_config = json.load(answer)["vllm_config"]["model_config"]
    assert model_config["logprobs_mode"] == "processed_logprobs"
    assert model_config["max_logprobs"] == -1
    assert model_config["generation_config"] == "vllm"
    assert model_config["max_model_len"] == 4096
    assert len(session_members(server.pid)) >= 2  # the API server and its engine


@pytest.mark.server
def test_real_server_ends_requests_before_their_first_token(server):
    """It then says nothing of them but that they are done, which is an abort like any other."""

    async def abort_at_once() -> list[list[Chunk]]:
        sampling = SamplingOptions({"temperature": 1.0, "ignore_eos": True})
        engine = VLLMEngine(server.base_url, server.model, sampling)
        asked = [GenerationRequest(f"early-{n}", [1, *[5 + n % 50] * 3000], 0, 500, f"early-{n}") for n in range(48)]

        async def collect(request: GenerationRequest) -> list[Chunk]:
            return [chunk async for chunk in engine.generate(request)]

        streams = [asyncio.create_task(collect(request)) for request in asked]
        await asyncio.sleep(0.3)  # sent, and not all of them decoded
        while not all(stream.done() for stream in streams):
            await engine.abort([request.request_id for request in asked])
            await asyncio.sleep(0.1)
        await engine.close()
        return [stream.result() for stream in streams]

    found = asyncio.run(abort_at_once())
    assert {chunks[-1].finish_reason for chunks in found} == {"abort"}
    assert any(chunks == [Chunk([], [], "abort")] for chunks in found)


@pytest.mark.server
def test_real_server_generates(server):
    body = {
        "model": server.model,
        "prompt": [1, 5, 6],
        "max_tokens": 8,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice = json.load(answer)["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 8
