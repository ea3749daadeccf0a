"""The launchers, run for real with stand-ins on the PATH that record how they were called.

What is behind the stand-ins (Slurm, several GPUs, several nodes) cannot be had here. What is in front of them can:
which command runs where, with which arguments and which environment, and what is left when it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest


ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
PR_SET_CHILD_SUBREAPER = 36  # of Linux
LAUNCHERS = [SCRIPTS / "launch_single_node.sh", SCRIPTS / "launch_slurm.sh"]

# A stand-in writes down how it was called before it does anything else.
RECORD = f"""#!{os.path.realpath(sys.executable)}
import json, os, signal, subprocess, sys, time
from pathlib import Path

name, arguments, records = Path(sys.argv[0]).name, sys.argv[1:], Path(os.environ["RECORDS"])
record = {{"arguments": arguments, "environment": dict(os.environ), "pid": os.getpid()}}
(records / f"{{name}}-{{time.monotonic_ns()}}.json").write_text(json.dumps(record))
"""

SERVER = """
import http.server, socket

print("loading weights", flush=True)
behaviour = os.environ.get("SERVER", "serves")
if behaviour == "dies":
    sys.exit("no such model")
if behaviour == "hangs":
    signal.pause()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

def stop(*_):
    (records / "server-stopped").write_text("")
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
host = arguments[arguments.index("--host") + 1] if "--host" in arguments else "127.0.0.1"
http.server.ThreadingHTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
http.server.ThreadingHTTPServer((host, int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""

TRAINER = """
if os.environ.get("TRAINER") == "runs":
    child = subprocess.Popen(["sleep", "600"])
    (records / "trainer-runs").write_text(str(child.pid))
    child.wait()
if os.environ.get("TRAINER") == "leaves a zombie":  # SIGTERM ends both, and neither has looked at the other
    child = subprocess.Popen(["sleep", "600"])
    (records / "trainer-runs").write_text(str(child.pid))
    signal.pause()
if os.environ.get("TRAINER") == "saves":
    def save(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (records / "trainer-saves").write_text("")
        time.sleep(1)
        (records / "trainer-saved").write_text("")
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    (records / "trainer-runs").write_text(str(os.getpid()))
    while True:
        signal.pause()
sys.exit(int(os.environ.get("TRAINER", 0)))
"""

# Runs the command once for each task, all of them here.
SRUN = """
options = [argument for argument in arguments if argument.startswith("--")]
command = arguments[next(i for i, argument in enumerate(arguments) if not argument.startswith("--")):]
(tasks,) = [int(option.split("=")[1]) for option in options if option.startswith("--ntasks=")]
signals = {signal.SIGTERM, signal.SIGUSR1}

def stop(number, _):
    for step in steps:  # srun forwards no SIGTERM; what it forwards, every process of the step gets
        os.killpg(step.pid, signal.SIGKILL if number == signal.SIGTERM else number)

for number in signals:
    signal.signal(number, stop)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until all steps are there to be told
steps = [
    subprocess.Popen(
        command,
        env={**os.environ, "SLURM_PROCID": str(rank)},
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals),
    )
    for rank in range(tasks)
]
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
sys.exit(max(step.wait() for step in steps))
"""

# `ray symmetric-run` runs the command on the first node only.
RAY = """
if os.environ["SLURM_PROCID"] == "0":
    command = arguments[arguments.index("--") + 1:]
    os.execvp(command[0], command)
"""

SCONTROL = """
assert arguments[:2] == ["show", "hostnames"]
print("\\n".join(arguments[2].split(",")))
"""

GETENT = """
if not os.environ["ADDRESS"]:
    sys.exit(2)
print(os.environ["ADDRESS"], "STREAM", arguments[1])
print(os.environ["ADDRESS"], "DGRAM")
"""

NVIDIA = 'print("\\n".join(str(n) for n in range({count})))\n'
ROCM = 'print("device,Device Name\\n" + "\\n".join(f"card{{n}},Instinct" for n in range({count})))\n'
AMD = 'print("gpu,gpu_bdf,gpu_uuid\\n" + "\\n".join(f"{{n}},0000:0{{n}}:00.0,u" for n in range({count})))\n'
BROKEN = "sys.exit(9)\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def machine(tmp_path):
    """A machine of stand-ins. `start` runs a launcher there, `records` is what they wrote down."""
    commands, records = tmp_path / "bin", tmp_path / "records"
    commands.mkdir()
    records.mkdir()

    def put(name: str, program: str) -> None:
        (commands / name).write_text(RECORD + program)
        (commands / name).chmod(0o755)

    for name, program in {
        "trl-april": SERVER, "accelerate": TRAINER, "srun": SRUN, "scontrol": SCONTROL, "getent": GETENT,
        "nvidia-smi": BROKEN, "amd-smi": BROKEN, "rocm-smi": BROKEN,
    }.items():  # fmt: skip
        put(name, program)
    (commands / "python3").symlink_to(os.path.realpath(sys.executable))

    def start(launcher: Path, *arguments: str, **environment: str) -> subprocess.Popen:
        clean = {"PATH": f"{commands}:/usr/bin:/bin", "RECORDS": str(records), "TMPDIR": str(tmp_path)}
        return subprocess.Popen(
            ["bash", str(launcher), *arguments],
            cwd=tmp_path,
            env={**clean, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(process: subprocess.Popen) -> SimpleNamespace:
        output, errors = process.communicate(timeout=60)
        return SimpleNamespace(returncode=process.returncode, output=output, errors=errors)

    def run(launcher: Path, *arguments: str, **environment: str) -> SimpleNamespace:
        return finish(start(launcher, *arguments, **environment))

    def calls(name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(**json.loads(path.read_text())) for path in sorted(records.glob(f"{name}-*.json"))]

    # Started in the background, the tests ignore SIGINT, and so does what they start; Bash cannot trap it then.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield SimpleNamespace(
        put=put, start=start, finish=finish, run=run, calls=calls, records=records, commands=commands
    )
    signal.signal(signal.SIGINT, before)
    started = [json.loads(path.read_text())["pid"] for path in records.glob("*.json")]
    deadline = time.monotonic() + 5
    while (left := [pid for pid in started if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes survived the launcher"


def _lives(pid: int) -> bool:
    """Whether it runs. One that has ended is a zombie until its parent looks, which may be nobody's but init's."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def option(arguments: list[str], name: str) -> str:
    assert arguments.count(name) == 1
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_bash_can_read_it(path):
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_shellcheck_has_no_complaints(path):
    subprocess.run([Path(sys.executable).parent / "shellcheck", path], check=True)


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_help(machine, path):
    done = machine.run(path, "--help")
    assert done.returncode == 0
    assert "--server-" in done.output


# One machine


def single_node(machine, *arguments: str, **environment: str) -> SimpleNamespace:
    return machine.run(LAUNCHERS[0], "dir/model", "--port", str(free_port()), *arguments, **environment)


def test_without_gpus_both_run_on_the_cpu(machine):
    port = str(free_port())
    done = machine.run(
        LAUNCHERS[0], "dir/model", "--port", port, "--", "--output_dir", "my out", "--", "--max-model-len", "4096"
    )
    assert done.returncode == 0, done.errors
    (server,), (trainer,) = machine.calls("trl-april"), machine.calls("accelerate")
    assert server.arguments == ["serve", "dir/model", "--port", port, "--max-model-len", "4096"]
    assert "CUDA_VISIBLE_DEVICES" not in server.environment
    assert trainer.arguments == [
        "launch", "--config_file", str(SCRIPTS / "accelerate" / "cpu_ddp.yaml"), "--num_processes", "1",
        str(SCRIPTS / "grpo.py"), "--model_name_or_path", "dir/model",
        "--vllm_server_base_url", f"http://127.0.0.1:{port}", "--bf16", "false", "--output_dir", "my out",
    ]  # fmt: skip
    assert trainer.environment["ACCELERATE_USE_CPU"] == "true"
    assert (machine.records / "server-stopped").exists()


@pytest.mark.parametrize(
    ("count", "options", "visible", "server_gpus", "trainer_gpus"),
    [
        (8, [], None, "0,1,2,3", "4,5,6,7"),
        (3, [], None, "0", "1,2"),
        (8, ["--server-gpus", "6"], None, "0,1,2,3,4,5", "6,7"),
        (8, ["--server-gpus", "1"], "3,5,7", "3", "5,7"),
        (8, [], "GPU-ab,GPU-cd", "GPU-ab", "GPU-cd"),
    ],
)
def test_nvidias_gpus_are_shared_out(machine, count, options, visible, server_gpus, trainer_gpus):
    machine.put("nvidia-smi", NVIDIA.format(count=count))
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = single_node(machine, *options, "--", "--output_dir", "out", **environment)
    assert done.returncode == 0, done.errors
    (server,), (trainer,) = machine.calls("trl-april"), machine.calls("accelerate")
    assert server.environment["CUDA_VISIBLE_DEVICES"] == server_gpus
    assert trainer.environment["CUDA_VISIBLE_DEVICES"] == trainer_gpus
    assert option(server.arguments, "--tensor-parallel-size") == str(len(server_gpus.split(",")))
    assert option(trainer.arguments, "--num_processes") == str(len(trainer_gpus.split(",")))
    assert option(trainer.arguments, "--config_file") == str(SCRIPTS / "accelerate" / "ddp.yaml")
    assert "ACCELERATE_USE_CPU" not in trainer.environment
    assert "HIP_VISIBLE_DEVICES" not in server.environment


@pytest.mark.parametrize(
    ("tool", "program", "environment", "server_gpus", "trainer_gpus"),
    [
        ("rocm-smi", ROCM, {}, "0,1", "2,3"),
        ("amd-smi", AMD, {}, "0,1", "2,3"),
        ("amd-smi", AMD, {"HIP_VISIBLE_DEVICES": "1,3"}, "1", "3"),
        ("amd-smi", AMD, {"CUDA_VISIBLE_DEVICES": "0,2"}, "0", "2"),
        ("amd-smi", AMD, {"ROCR_VISIBLE_DEVICES": "2,3"}, "0", "1"),
    ],
)
def test_amds_gpus_are_shared_out(machine, tool, program, environment, server_gpus, trainer_gpus):
    machine.put(tool, program.format(count=4))
    done = single_node(machine, "--", "--output_dir", "out", **environment)
    assert done.returncode == 0, done.errors
    (server,), (trainer,) = machine.calls("trl-april"), machine.calls("accelerate")
    assert server.environment["HIP_VISIBLE_DEVICES"] == server_gpus
    assert trainer.environment["HIP_VISIBLE_DEVICES"] == trainer_gpus
    # vLLM on ROCm refuses two lists that differ.
    assert "CUDA_VISIBLE_DEVICES" not in {**server.environment, **trainer.environment}


def test_the_configuration_and_the_processes_are_the_users(machine):
    config = str(SCRIPTS / "accelerate" / "cpu_ddp.yaml")
    assert single_node(machine, "--config", config, "--processes", "2").returncode == 0
    (trainer,) = machine.calls("accelerate")
    assert option(trainer.arguments, "--config_file") == config
    assert option(trainer.arguments, "--num_processes") == "2"


def test_the_exit_code_is_the_trainers(machine):
    assert single_node(machine, TRAINER="7").returncode == 7
    assert (machine.records / "server-stopped").exists()


def test_a_server_that_dies_ends_it_with_the_log(machine):
    done = single_node(machine, SERVER="dies")
    assert done.returncode == 1
    assert "the server ended while it was starting" in done.errors
    assert "no such model" in done.errors
    assert not machine.calls("accelerate")


def test_a_server_that_never_gets_ready_is_given_up(machine):
    done = single_node(machine, "--timeout", "1", SERVER="hangs")
    assert done.returncode == 1
    assert "not ready after 1 s (--timeout)" in done.errors
    assert not machine.calls("accelerate")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_the_trainer_and_then_the_server(machine, number, code):
    process = machine.start(LAUNCHERS[0], "dir/model", "--port", str(free_port()), TRAINER="runs")
    started = machine.records / "trainer-runs"
    deadline = time.monotonic() + 30
    while not (started.exists() and started.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert (machine.records / "server-stopped").exists()
    assert not _lives(int(started.read_text())), "the trainer's child"


def _wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def _ends_after_the_checkpoint(machine, process: subprocess.Popen) -> None:
    """Ends it by a signal, and by another one while the trainer saves."""
    _wait_for(machine.records / "trainer-runs", process)
    process.send_signal(signal.SIGTERM)
    _wait_for(machine.records / "trainer-saves", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    saved, stopped = (machine.records / name for name in ("trainer-saved", "server-stopped"))
    assert saved.stat().st_mtime_ns < stopped.stat().st_mtime_ns
    for call in machine.calls("accelerate"):  # after 30 seconds torchrun would kill who saves
        assert call.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "600"


@pytest.fixture
def subreaper(machine):
    """Orphans of what a test starts become children of the tests, as they do of an init that looks at none of them."""
    if sys.platform != "linux":
        pytest.skip("orphans go to init alone")
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = {child.pid for child in psutil.Process().children()}
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    assert prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
    for child in psutil.Process().children():
        if child.pid not in before and child.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(child.pid, 0)


@pytest.mark.skipif(shutil.which("ps", path="/usr/bin:/bin") is None, reason="it cannot tell zombies without ps")
def test_a_zombie_that_nobody_looks_at_is_not_waited_for(machine, subreaper):
    """As in a container, where the first process may be one that never does: it stays in the trainer's group."""
    process = machine.start(LAUNCHERS[0], "dir/model", "--port", str(free_port()), TRAINER="leaves a zombie")
    started = machine.records / "trainer-runs"
    try:
        _wait_for(started, process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)  # and not TORCH_ELASTIC_SHUTDOWN_TIMEOUT, which is 600
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143
    assert (machine.records / "server-stopped").exists()
    assert psutil.Process(int(started.read_text())).status() == psutil.STATUS_ZOMBIE


def test_the_trainer_has_time_to_save_whatever_signals_come(machine):
    process = machine.start(LAUNCHERS[0], "dir/model", "--port", str(free_port()), TRAINER="saves")
    _ends_after_the_checkpoint(machine, process)


def test_another_server_on_the_port_is_not_taken_for_ours(machine):
    port = free_port()
    other = subprocess.Popen(
        [machine.commands / "trl-april", "serve", "m", "--port", str(port)],
        env={"RECORDS": str(machine.records)},
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 10
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        done = machine.run(LAUNCHERS[0], "m", "--port", str(port))
    finally:
        other.terminate()
        other.wait()
    assert done.returncode == 1
    assert f"a server answers on port {port} already" in done.errors
    assert len(machine.calls("trl-april")) == 1


@pytest.mark.parametrize(
    ("count", "arguments", "said"),
    [
        (0, [], "the model is left out"),
        (0, ["m", "n"], "'n' comes after the model, 'm'"),
        (0, ["m", "--output_dir", "out"], "--output_dir is not an option of this script"),
        (0, ["m", "--port"], "--port needs a value"),
        (0, ["m", "--port", "many"], "--port is 'many', but it must be a whole number"),
        (0, ["m", "--server-gpus", "1"], "--server-gpus is 1, but no GPU was found"),
        (0, ["m", "--config", "no.yaml"], "--config is 'no.yaml', but there is no such file"),
        (1, ["m"], "one GPU was found (0), but server and trainer need one each"),
        (4, ["m", "--server-gpus", "4"], "--server-gpus is 4 of 4"),
        (4, ["m", "--server-gpus", "0"], "--server-gpus is '0', but it must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_a_sentence(machine, count, arguments, said):
    if count:
        machine.put("nvidia-smi", NVIDIA.format(count=count))
    done = machine.run(LAUNCHERS[0], *arguments)
    assert done.returncode == 1
    assert f"launch_single_node.sh: error: {said}" in done.errors
    assert not machine.calls("trl-april")


def test_an_environment_that_is_not_active_is_named(machine):
    (machine.commands / "accelerate").unlink()
    assert "accelerate is not on the PATH" in machine.run(LAUNCHERS[0], "m").errors


# Slurm


@pytest.fixture
def job(machine, tmp_path):
    """A Slurm job on the machine of stand-ins; the script is a copy somewhere else, as sbatch makes one."""
    script = Path(shutil.copy(LAUNCHERS[1], tmp_path / "slurm_script"))
    submitted = tmp_path / "submitted"
    submitted.mkdir()
    (submitted / "scripts").symlink_to(SCRIPTS)
    machine.put("ray", RAY)

    def start(*arguments: str, nodes: str = "n1,n2,n3", **environment: str) -> subprocess.Popen:
        slurm = {
            "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "grpo",
            "SLURM_GPUS_ON_NODE": "8", "SLURM_SUBMIT_DIR": str(submitted), "ADDRESS": "127.0.0.1",
        }  # fmt: skip
        return machine.start(script, "dir/model", *arguments, **{**slurm, **environment})

    def run(*arguments: str, **options: str) -> SimpleNamespace:
        return machine.finish(start(*arguments, **options))

    return SimpleNamespace(start=start, run=run, calls=machine.calls, records=machine.records, folder=submitted)


def test_an_ipv6_address_is_in_brackets_where_a_port_follows(job):
    done = job.run("--server-address", "::1", "--port", port := str(free_port()))
    assert done.returncode == 0, done.errors
    (server,), trainer = job.calls("trl-april"), job.calls("accelerate")[0]
    assert option(server.arguments, "--host") == "::1"
    assert option(trainer.arguments, "--vllm_server_base_url") == f"http://[::1]:{port}"


def test_the_server_is_on_the_last_node_and_the_trainer_on_the_others(job):
    port = str(free_port())
    done = job.run(
        "--server-address", "127.0.0.1", "--port", port, "--", "--output_dir", "my out", "--", "--seed", "3"
    )
    assert done.returncode == 0, done.errors
    (server,) = job.calls("trl-april")
    assert server.arguments == [
        "serve", "dir/model", "--host", "127.0.0.1", "--port", port, "--tensor-parallel-size", "8", "--seed", "3",
    ]  # fmt: skip
    ranks = sorted(job.calls("accelerate"), key=lambda call: option(call.arguments, "--machine_rank"))
    assert [call.arguments for call in ranks] == [
        [
            "launch", "--machine_rank", rank, "--config_file", "scripts/accelerate/ddp.yaml",
            "--num_machines", "2", "--num_processes", "16", "--main_process_ip", "n1", "--main_process_port", "29500",
            "--rdzv_backend", "static", "--same_network", "scripts/grpo.py", "--model_name_or_path", "dir/model",
            "--vllm_server_base_url", f"http://127.0.0.1:{port}", "--output_dir", "my out",
        ]
        for rank in "01"
    ]  # fmt: skip
    serving, training = job.calls("srun")
    assert {"--nodelist=n3", "--nodes=1", "--ntasks=1", "--export=ALL"} <= set(serving.arguments)
    assert {"--nodelist=n1,n2", "--nodes=2", "--ntasks=2", "--export=ALL"} <= set(training.arguments)
    assert (job.records / "server-stopped").exists()
    assert "loading weights" in (job.folder / "grpo-17-server.log").read_text()
    assert not job.calls("ray")


def test_the_api_key_is_drawn_for_the_job_and_shown_to_nobody(job):
    keys = []
    for _ in range(2):
        done = job.run("--server-address", "127.0.0.1", "--port", str(free_port()), nodes="n1,n2")
        assert done.returncode == 0, done.errors
        server, trainer = job.calls("trl-april")[-1], job.calls("accelerate")[-1]
        key = server.environment["VLLM_API_KEY"]
        assert trainer.environment["VLLM_API_KEY"] == key
        assert key not in done.output + done.errors
        for name in ("srun", "trl-april", "accelerate"):  # every user of a node sees command lines
            assert not any(key in argument for call in job.calls(name) for argument in call.arguments)
        keys.append(key)
    assert keys[0] != keys[1] and min(map(len, keys)) >= 32


def test_a_key_that_is_set_is_kept(job):
    job.run("--server-address", "127.0.0.1", "--port", str(free_port()), VLLM_API_KEY="mine")
    assert job.calls("trl-april")[0].environment["VLLM_API_KEY"] == "mine"


def test_several_nodes_of_the_server_are_joined_by_ray(job):
    done = job.run(
        "--server-nodes", "2", "--server-address", "127.0.0.1", "--port", str(free_port()),
        "--gpus-per-node", "4", "--config", "scripts/accelerate/zero3.yaml", nodes="n1,n2,n3,n4,n5",
    )  # fmt: skip
    assert done.returncode == 0, done.errors
    serving, _ = job.calls("srun")
    assert {"--nodelist=n4,n5", "--nodes=2", "--ntasks=2"} <= set(serving.arguments)
    for call in job.calls("ray"):  # the same on both: Ray finds out which is the first
        assert call.arguments[:8] == [
            "symmetric-run", "--address", "127.0.0.1:6379", "--min-nodes", "2", "--num-gpus", "4", "--",
        ]  # fmt: skip
    assert len(job.calls("ray")) == 2
    (server,) = job.calls("trl-april")
    assert option(server.arguments, "--tensor-parallel-size") == "4"
    assert option(server.arguments, "--data-parallel-size") == "2"
    # Without it vLLM wants all copies on the first node.
    assert option(server.arguments, "--data-parallel-size-local") == "1"
    assert option(server.arguments, "--data-parallel-backend") == "ray"
    assert option(server.arguments, "--data-parallel-address") == "127.0.0.1"
    assert option(job.calls("accelerate")[0].arguments, "--num_processes") == "12"
    assert option(job.calls("accelerate")[0].arguments, "--config_file") == "scripts/accelerate/zero3.yaml"


def test_the_server_binds_to_the_address_that_the_first_node_sees(job):
    # Long enough for the server to have been started: by Bash's clock, a second may be over at once.
    done = job.run("--timeout", "5", ADDRESS="192.0.2.77", SERVER="hangs")
    assert "not ready after 5 s" in done.errors
    assert job.calls("getent")[0].arguments == ["ahostsv4", "n3"]
    assert option(job.calls("trl-april")[0].arguments, "--host") == "192.0.2.77"


def test_the_trainer_of_a_job_has_time_to_save_whatever_signals_come(machine, job):
    process = job.start("--server-address", "127.0.0.1", "--port", str(free_port()), nodes="n1,n2", TRAINER="saves")
    _ends_after_the_checkpoint(machine, process)


def test_the_exit_code_of_the_job_is_the_trainers(job):
    done = job.run("--server-address", "127.0.0.1", "--port", str(free_port()), TRAINER="7")
    assert done.returncode == 7
    assert (job.records / "server-stopped").exists()


def test_a_server_that_dies_ends_the_job_with_the_log(job):
    done = job.run("--server-address", "127.0.0.1", "--port", str(free_port()), SERVER="dies")
    assert done.returncode == 1
    assert "no such model" in done.errors
    assert not job.calls("accelerate")


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ([], {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ([], {"SLURM_GPUS_ON_NODE": ""}, "Slurm gave no GPUs"),
        ([], {"SLURM_SUBMIT_DIR": "/"}, "there is no scripts/grpo.py in /"),
        ([], {}, "n3 resolves to '127.0.0.1', where other nodes do not reach it"),
        ([], {"ADDRESS": ""}, "n3 resolves to '', where other nodes do not reach it"),
        (["--server-nodes", "3"], {}, "the job has 3 nodes, and --server-nodes is 3"),
        (["--server-nodes", "no"], {}, "--server-nodes is 'no', but it must be a whole number"),
        (["--config", "no.yaml"], {}, "--config is 'no.yaml', but there is no such file"),
        (["--output_dir", "out"], {}, "--output_dir is not an option of this script"),
        (["--", "--weight_sync", "filesystem"], {}, "--weight_sync is filesystem without --weight_sync_dir"),
        (["--", "--weight-sync=filesystem"], {}, "--weight_sync is filesystem without --weight_sync_dir"),
    ],
)
def test_a_job_that_cannot_run_is_refused_in_a_sentence(job, arguments, environment, said):
    done = job.run(*arguments, **environment)
    assert done.returncode == 1
    assert f"launch_slurm.sh: error: {said}" in done.errors
    assert not job.calls("srun")


def test_weights_through_a_shared_folder(job):
    shared = ["--weight_sync", "filesystem", "--weight_sync_dir", "/shared/weights"]
    done = job.run("--server-address", "127.0.0.1", "--port", str(free_port()), "--", *shared)
    assert done.returncode == 0, done.errors
    assert job.calls("accelerate")[0].arguments[-4:] == shared
