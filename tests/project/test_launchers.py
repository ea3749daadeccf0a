"""The launchers, with stand-ins on the PATH for Slurm, Ray, accelerate and the vendors' tools.

The stand-ins record which command ran where, with which arguments and environment, and which processes were left.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.support.launch import free_port


SCRIPTS = Path(__file__).parents[2] / "scripts"

PR_SET_CHILD_SUBREAPER = 36  # of Linux
LAUNCHERS = [SCRIPTS / "launch_single_node.sh", SCRIPTS / "launch_slurm.sh"]

# A stand-in first records its call.
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
if os.environ.get("TRAINER") == "leaves a zombie":  # signals stop both; nobody reaps the child
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

# Runs the command once per task, all on this host.
SRUN = """
options = [argument for argument in arguments if argument.startswith("--")]
command = arguments[next(i for i, argument in enumerate(arguments) if not argument.startswith("--")):]
(tasks,) = [int(option.split("=")[1]) for option in options if option.startswith("--ntasks=")]
signals = {signal.SIGTERM, signal.SIGUSR1}

def stop(number, _):
    for step in steps:  # srun forwards no SIGTERM, and other signals to every process of the step
        os.killpg(step.pid, signal.SIGKILL if number == signal.SIGTERM else number)

for number in signals:
    signal.signal(number, stop)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until all steps can receive them
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

# Runs what the launchers give it, but answers by itself how many servers fit: by default, one for each GPU.
PYTHON = f"""#!/bin/bash
if [[ $2 == -m ]]; then
    echo "${{CUDA_VISIBLE_DEVICES-$HIP_VISIBLE_DEVICES}} $*" >"$RECORDS/fit"
    [[ -n ${{FIT-$5}} ]] || {{ echo "The size of '$4' is not known" >&2; exit 1; }}
    echo "${{FIT-$5}}"
    exit
fi
exec {os.path.realpath(sys.executable)} "$@"
"""

GPUS = {
    "nvidia-smi": 'print("\\n".join(str(n) for n in range({count})))\n',
    "rocm-smi": 'print("device,Device Name\\n" + "\\n".join(f"card{{n}},Instinct" for n in range({count})))\n',
    "amd-smi": 'print("gpu,gpu_bdf,gpu_uuid\\n" + "\\n".join(f"{{n}},0000:0{{n}}:00.0,u" for n in range({count})))\n',
}
BROKEN = "sys.exit(9)\n"


@pytest.fixture
def machine(tmp_path):
    """A machine of stand-ins. `start` runs a launcher; `calls` reads the records."""
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
    (commands / "python3").write_text(PYTHON)
    (commands / "python3").chmod(0o755)

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

    # Background jobs ignore SIGINT, and Bash cannot trap an ignored signal.
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
    """Whether the process runs; zombies do not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def option(arguments: list[str], name: str) -> str:
    assert arguments.count(name) == 1
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_launcher_passes_shellcheck_and_prints_help(machine, path):
    assert os.access(path, os.X_OK)
    subprocess.run([Path(sys.executable).parent / "shellcheck", path], check=True)
    done = machine.run(path, "--help")
    assert done.returncode == 0
    assert "--server-" in done.output


# One machine


def single_node(machine, *arguments: str, **environment: str) -> SimpleNamespace:
    return machine.run(LAUNCHERS[0], "dir/model", "--port", str(free_port(4)), *arguments, **environment)


def test_server_and_trainer_run_on_a_cpu_without_gpus(machine):
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
    ("tool", "count", "options", "environment", "server_gpus", "trainer_gpus"),
    [
        ("nvidia-smi", 8, [], {}, "0,1,2,3", "4,5,6,7"),
        ("nvidia-smi", 8, ["--server-gpus", "1"], {"CUDA_VISIBLE_DEVICES": "3,5,7"}, "3", "5,7"),
        ("nvidia-smi", 8, [], {"CUDA_VISIBLE_DEVICES": "GPU-ab,GPU-cd"}, "GPU-ab", "GPU-cd"),
        ("rocm-smi", 4, [], {}, "0,1", "2,3"),
        ("amd-smi", 4, [], {"HIP_VISIBLE_DEVICES": "1,3"}, "1", "3"),
        ("amd-smi", 4, [], {"ROCR_VISIBLE_DEVICES": "2,3"}, "0", "1"),
    ],
)
def test_gpus_are_divided(machine, tool, count, options, environment, server_gpus, trainer_gpus):
    machine.put(tool, GPUS[tool].format(count=count))
    done = single_node(machine, *options, "--", "--output_dir", "out", **environment)
    assert done.returncode == 0, done.errors
    servers, (trainer,) = machine.calls("trl-april"), machine.calls("accelerate")
    # vLLM on ROCm refuses two lists that differ.
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    visible, other = names if tool == "nvidia-smi" else reversed(names)
    by_port = sorted(servers, key=lambda server: int(option(server.arguments, "--port")))
    assert ",".join(server.environment[visible] for server in by_port) == server_gpus
    assert trainer.environment[visible] == trainer_gpus
    assert not any(other in call.environment for call in (*servers, trainer))
    assert not any("--tensor-parallel-size" in server.arguments for server in servers)
    addresses = [f"http://127.0.0.1:{option(server.arguments, '--port')}" for server in by_port]
    assert option(trainer.arguments, "--vllm_server_base_url") == ",".join(addresses)
    assert option(trainer.arguments, "--num_processes") == str(len(trainer_gpus.split(",")))
    assert option(trainer.arguments, "--config_file") == str(SCRIPTS / "accelerate" / "ddp.yaml")
    assert "ACCELERATE_USE_CPU" not in trainer.environment


@pytest.mark.parametrize(
    ("fit", "arguments", "servers", "parallel"),
    [
        ("2", ["--", "--", "--dtype", "half"], 2, "2"),
        ("", ["--servers", "2"], 2, "2"),
        ("", ["--", "--output_dir", "out", "--", "--data-parallel-size=4"], 1, None),
    ],
)
def test_a_server_gets_as_many_gpus_as_its_weights_need(machine, fit, arguments, servers, parallel):
    """See `tests/server/test_model_size.py` for their number. Nobody asks for it where the user says it."""
    machine.put("nvidia-smi", GPUS["nvidia-smi"].format(count=8))
    done = single_node(machine, *arguments, FIT=fit)
    assert done.returncode == 0, done.errors
    if fit:
        asked = "0,1,2,3 -P -m trl_april.server.model_size dir/model 4 --dtype half"
        assert (machine.records / "fit").read_text().strip() == asked
    calls = machine.calls("trl-april")
    assert len(calls) == servers
    for call in calls:
        assert (option(call.arguments, "--tensor-parallel-size") if parallel else None) == parallel
        assert len(call.environment["CUDA_VISIBLE_DEVICES"].split(",")) == 4 // servers


def test_configuration_and_processes_are_passed_through(machine):
    config = str(SCRIPTS / "accelerate" / "cpu_ddp.yaml")
    assert single_node(machine, "--config", config, "--processes", "2").returncode == 0
    (trainer,) = machine.calls("accelerate")
    assert option(trainer.arguments, "--config_file") == config
    assert option(trainer.arguments, "--num_processes") == "2"


def _wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and (path.read_text() or path.name != "trainer-runs")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def subreaper(machine):
    """Makes orphans children of this process, as of an init that never reaps them."""
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


@pytest.mark.skipif(shutil.which("ps", path="/usr/bin:/bin") is None, reason="zombies are found by ps")
def test_signal_stops_trainer_and_server_without_waiting_for_a_zombie(machine, subreaper):
    """In a container, the first process may never reap zombies; they stay in the trainer's process group."""
    process = machine.start(LAUNCHERS[0], "dir/model", "--port", str(free_port()), TRAINER="leaves a zombie")
    started = machine.records / "trainer-runs"
    try:
        _wait_for(started, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)  # shorter than TORCH_ELASTIC_SHUTDOWN_TIMEOUT, 600
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert (machine.records / "server-stopped").exists()
    assert psutil.Process(int(started.read_text())).status() == psutil.STATUS_ZOMBIE


def test_port_of_another_server_is_refused(machine, tmp_path):
    (tmp_path / "health").touch()
    with HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        done = machine.run(LAUNCHERS[0], "m", "--port", str(other.server_port))
    assert done.returncode == 1
    assert f"a server answers on port {other.server_port} already" in done.errors
    assert not machine.calls("trl-april")


@pytest.mark.parametrize(
    ("count", "arguments", "said"),
    [
        (0, [], "the model is left out"),
        (0, ["m", "n"], "'n' comes after the model, 'm'"),
        (0, ["m", "--output_dir", "out"], "--output_dir is not an option of this script"),
        (0, ["m", "--server-gpus", "1"], "--server-gpus is 1, but no GPU was found"),
        (1, ["m"], "one GPU was found (0), but server and trainer need one each"),
        (4, ["m", "--server-gpus", "4"], "--server-gpus is 4 of 4"),
        (4, ["m", "--servers", "3"], "--servers is 3, which does not divide the 2 GPUs of --server-gpus"),
        (4, ["m", "--server-gpus", "0"], "--server-gpus is '0', but it must be a whole number of at least 1"),
        (4, ["m"], "how many servers fit on the GPUs is not known, for the reason above. Say it: --servers N."),
    ],
)
def test_invalid_launch_is_refused_with_a_reason(machine, count, arguments, said):
    if count:
        machine.put("nvidia-smi", GPUS["nvidia-smi"].format(count=count))
    done = machine.run(LAUNCHERS[0], *arguments, FIT="")
    assert done.returncode == 1
    assert f"launch_single_node.sh: error: {said}" in done.errors
    assert not machine.calls("trl-april")


# Slurm


@pytest.fixture
def job(machine, tmp_path):
    """A Slurm job on the machine of stand-ins. As by sbatch, the script is a copy in another folder."""
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


def test_server_is_on_the_last_node_and_the_trainer_on_the_others(job):
    port = str(free_port())
    done = job.run(
        "--server-address", "127.0.0.1", "--port", port, "--", "--output_dir", "my out", "--", "--seed", "3", FIT="1"
    )
    assert done.returncode == 0, done.errors
    (server,) = job.calls("trl-april")
    assert server.arguments == [
        "serve", "dir/model", "--tensor-parallel-size", "8", "--seed", "3", "--host", "127.0.0.1", "--port", port,
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


def test_api_key_is_drawn_for_the_job_unless_set_and_stays_secret(job):
    keys = []
    for given in ({}, {"VLLM_API_KEY": "given-by-the-user"}):
        one = ["--server-address", "127.0.0.1", "--servers", "1"]
        done = job.run(*one, "--port", str(free_port()), nodes="n1,n2", **given)
        assert done.returncode == 0, done.errors
        server, trainer = job.calls("trl-april")[-1], job.calls("accelerate")[-1]
        key = server.environment["VLLM_API_KEY"]
        assert trainer.environment["VLLM_API_KEY"] == key
        assert key not in done.output + done.errors
        for name in ("srun", "trl-april", "accelerate"):  # every user of a node sees command lines
            assert not any(key in argument for call in job.calls(name) for argument in call.arguments)
        keys.append(key)
    assert len(keys[0]) >= 32 and keys[1] == "given-by-the-user"


def test_each_server_of_a_node_has_gpus_and_a_port_of_its_own(job):
    port = free_port(2)
    arguments = ["--server-nodes", "2", "--gpus-per-node", "4", "--server-address", "127.0.0.1,127.0.0.2"]
    done = job.run(*arguments, "--port", str(port), FIT="2", CUDA_VISIBLE_DEVICES="3,4,6,7")
    assert done.returncode == 0, done.errors
    where = [(host, str(port + number)) for host in ("127.0.0.1", "127.0.0.2") for number in range(2)]
    servers = job.calls("trl-april")
    assert sorted((option(one.arguments, "--host"), option(one.arguments, "--port")) for one in servers) == where
    for one in servers:
        assert option(one.arguments, "--tensor-parallel-size") == "2"
        gpus = "3,4" if option(one.arguments, "--port") == str(port) else "6,7"
        assert one.environment["CUDA_VISIBLE_DEVICES"] == one.environment["HIP_VISIBLE_DEVICES"] == gpus
    (trainer,) = job.calls("accelerate")
    addresses = [f"http://{host}:{port}" for host, port in where]
    assert option(trainer.arguments, "--vllm_server_base_url") == ",".join(addresses)
    serving, _ = job.calls("srun")
    assert {"--nodelist=n2,n3", "--nodes=2", "--ntasks=2"} <= set(serving.arguments)
    assert not job.calls("ray")


def test_several_server_nodes_are_joined_by_ray(job):
    shared = ["--weight_sync", "filesystem", "--weight_sync_dir", "/shared/weights"]
    done = job.run(
        "--server-nodes", "2", "--server-address", "::1", "--port", port := str(free_port()), "--gpus-per-node", "4",
        "--config", "scripts/accelerate/zero3.yaml", "--", *shared,
        "--", "--tensor-parallel-size", "4", "--data-parallel-size", "2", nodes="n1,n2,n3,n4,n5",
    )  # fmt: skip
    assert done.returncode == 0, done.errors
    serving, _ = job.calls("srun")
    assert {"--nodelist=n4,n5", "--nodes=2", "--ntasks=2"} <= set(serving.arguments)
    for call in job.calls("ray"):  # the same on both nodes: Ray finds the first one
        assert call.arguments[:8] == [
            "symmetric-run", "--address", "[::1]:6379", "--min-nodes", "2", "--num-gpus", "4", "--",
        ]  # fmt: skip
    assert len(job.calls("ray")) == 2
    (server,) = job.calls("trl-april")
    assert server.arguments[-8:] == [  # by default vLLM expects all copies on the first node
        "--data-parallel-backend", "ray", "--data-parallel-address", "::1",
        "--tensor-parallel-size", "4", "--data-parallel-size", "2",
    ]  # fmt: skip
    trainer = job.calls("accelerate")[0].arguments
    assert option(trainer, "--num_processes") == "12"
    assert option(trainer, "--config_file") == "scripts/accelerate/zero3.yaml"
    assert option(trainer, "--vllm_server_base_url") == f"http://[::1]:{port}"
    assert trainer[-4:] == shared


@pytest.mark.long
def test_server_binds_to_the_address_that_the_first_node_resolves(job):
    # Long enough for the server to start.
    done = job.run("--timeout", "5", "--servers", "1", ADDRESS="192.0.2.77", SERVER="hangs")
    assert "not ready after 5 s" in done.errors
    assert job.calls("getent")[0].arguments == ["ahostsv4", "n3"]
    assert option(job.calls("trl-april")[0].arguments, "--host") == "192.0.2.77"


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ([], {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ([], {"SLURM_GPUS_ON_NODE": ""}, "Slurm gave no GPUs"),
        ([], {"SLURM_SUBMIT_DIR": "/"}, "there is no scripts/grpo.py in /"),
        ([], {}, "n3 resolves to '127.0.0.1', where other nodes do not reach it"),
        (["--server-nodes", "3"], {}, "the job has 3 nodes, and --server-nodes is 3"),
        (
            ["--server-address", "::1,::2"],
            {},
            "--server-address has 2 addresses for 1 server nodes. Give one for each",
        ),
        (["--server-address", "::1"], {"FIT": ""}, "how many servers fit on the GPUs is not known"),
        (["--", "--weight_sync", "filesystem"], {}, "--weight_sync is filesystem without --weight_sync_dir"),
    ],
)
def test_invalid_job_is_refused_with_a_reason(job, arguments, environment, said):
    done = job.run(*arguments, **environment)
    assert done.returncode == 1
    assert f"launch_slurm.sh: error: {said}" in done.errors
    assert not job.calls("srun")


# Both launchers


@pytest.fixture(params=["single node", "slurm"])
def launch(request, machine, job):
    """Starts one of the launchers."""
    address = ["--server-address", "127.0.0.1", "--servers", "1"]
    start = partial(job.start, *address) if request.param == "slurm" else partial(machine.start, LAUNCHERS[0], "m")
    return partial(start, "--port", str(free_port()))


@pytest.mark.parametrize(
    ("environment", "code", "message"),
    [
        ({"TRAINER": "7"}, 7, ""),
        ({"SERVER": "dies"}, 1, "the server ended while it was starting"),
        ({"SERVER": "hangs"}, 1, "the server was not ready after 1 s (--timeout)"),
    ],
)
def test_failure_ends_the_launch_with_its_exit_code(machine, launch, environment, code, message):
    done = machine.finish(launch("--timeout", "1" if "hangs" in environment.values() else "60", **environment))
    assert done.returncode == code
    assert message in done.errors
    assert ("no such model" in done.errors) == ("dies" in environment.values())
    assert bool(machine.calls("accelerate")) == (machine.records / "server-stopped").exists() == (code == 7)


def test_trainer_has_time_to_save_despite_further_signals(machine, launch):
    process = launch(TRAINER="saves")
    _wait_for(machine.records / "trainer-runs", process)
    process.send_signal(signal.SIGTERM)
    _wait_for(machine.records / "trainer-saves", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    saved, stopped = (machine.records / name for name in ("trainer-saved", "server-stopped"))
    assert saved.stat().st_mtime_ns < stopped.stat().st_mtime_ns
    for call in machine.calls("accelerate"):  # torchrun's default is 30 seconds
        assert call.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "600"
