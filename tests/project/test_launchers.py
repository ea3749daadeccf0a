"""The launchers, with stand-ins on the PATH for Slurm, Ray, accelerate, the servers and the vendors' tools.

Each stand-in records its arguments and environment.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.launch import free_port


SCRIPTS = Path(__file__).parents[2] / "scripts"
SINGLE_NODE, SLURM = SCRIPTS / "launch_single_node.sh", SCRIPTS / "launch_slurm.sh"
BASH = "/usr/bin:/bin"

RECORD = f"""#!{os.path.realpath(sys.executable)}
import json, os, signal, subprocess, sys, time
from pathlib import Path

name, arguments, records = Path(sys.argv[0]).name, sys.argv[1:], Path(os.environ["RECORDS"])
record = {{"arguments": arguments, "environment": dict(os.environ)}}
(records / f"{{name}}-{{time.monotonic_ns()}}.json").write_text(json.dumps(record))
"""
SERVER = """
import http.server, socket

if os.environ.get("SERVER") == "dies":
    sys.exit("no such model")

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def stop(*_):
    (records / "server-stopped").write_text("")
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
host = arguments[arguments.index("--host") + 1] if "--host" in arguments else "127.0.0.1"
http.server.ThreadingHTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
http.server.ThreadingHTTPServer((host, int(arguments[arguments.index("--port") + 1])), Healthy).serve_forever()
"""
TRAINER = """
if os.environ.get("TRAINER") == "saves":
    def save(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (records / "trainer-saves").write_text("")
        time.sleep(0.5)
        (records / "trainer-saved").write_text("")
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    (records / "trainer-runs").write_text("")
    while True:
        signal.pause()
sys.exit(int(os.environ.get("TRAINER", 0)))
"""
# Runs the command once per task, all on this host. srun kills its step on SIGTERM, and forwards other signals.
SRUN = """
options = [argument for argument in arguments if argument.startswith("--")]
command = arguments[next(i for i, argument in enumerate(arguments) if not argument.startswith("--")):]
(tasks,) = [int(option.split("=")[1]) for option in options if option.startswith("--ntasks=")]
signals = {signal.SIGTERM, signal.SIGUSR1}

def forward(number, _):
    for step in steps:
        os.killpg(step.pid, signal.SIGKILL if number == signal.SIGTERM else number)

for number in signals:
    signal.signal(number, forward)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until all steps can receive them
unblock = lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
steps = [
    subprocess.Popen(
        command, env={**os.environ, "SLURM_PROCID": str(rank)}, start_new_session=True, preexec_fn=unblock
    )
    for rank in range(tasks)
]
unblock()
sys.exit(max(step.wait() for step in steps))
"""
# `ray symmetric-run` runs the command on the first node only.
RAY = """
if os.environ["SLURM_PROCID"] == "0":
    command = arguments[arguments.index("--") + 1:]
    os.execvp(command[0], command)
"""
SCONTROL = 'print("\\n".join(arguments[2].split(",")))\n'
# Answers the question how many servers fit with FIT, by default one for each GPU.
PYTHON = f"""#!/bin/bash
if [[ $2 == -m ]]; then
    echo "${{CUDA_VISIBLE_DEVICES-$HIP_VISIBLE_DEVICES}} $*" >"$RECORDS/fit"
    [[ -n ${{FIT-$5}} ]] || exit 1
    echo "${{FIT-$5}}"
    exit
fi
exec {os.path.realpath(sys.executable)} "$@"
"""
SLEEP = "#!/bin/bash\nexec /bin/sleep 0.1\n"  # between two looks at a server that starts
GPUS = {
    "nvidia-smi": 'print("\\n".join(str(n) for n in range({count})))\n',
    "amd-smi": 'print("gpu,gpu_bdf,gpu_uuid\\n" + "\\n".join(f"{{n}},0000:0{{n}}:00.0,u" for n in range({count})))\n',
}


@pytest.fixture
def machine(tmp_path):
    """A machine of stand-ins. `start` runs a launcher; `calls` reads the records."""
    commands, records, submitted = (tmp_path / name for name in ("bin", "records", "submitted"))
    for folder in (commands, records, submitted):
        folder.mkdir()

    def put(name: str, program: str) -> None:
        (commands / name).write_text(program if program.startswith("#!") else RECORD + program)
        (commands / name).chmod(0o755)

    for name, program in {
        "trl-april": SERVER, "accelerate": TRAINER, "srun": SRUN, "ray": RAY, "scontrol": SCONTROL, "python3": PYTHON,
        "sleep": SLEEP, **dict.fromkeys(("nvidia-smi", "amd-smi", "rocm-smi"), "sys.exit(9)\n"),
    }.items():  # fmt: skip
        put(name, program)

    def start(launcher: Path, *arguments: str, **environment: str) -> subprocess.Popen:
        clean = {"PATH": f"{commands}:{BASH}", "RECORDS": str(records), "TMPDIR": str(tmp_path)}
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(
            ["bash", str(launcher), *arguments], cwd=tmp_path, env={**clean, **environment}, text=True, **pipes
        )

    # As by sbatch, the script of a job is a copy in another folder.
    script = shutil.copy(SLURM, tmp_path / "slurm_script")
    (submitted / "scripts").symlink_to(SCRIPTS)

    def job(*arguments: str, nodes: str = "n1,n2,n3", **environment: str) -> subprocess.Popen:
        slurm = {
            "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "grpo",
            "SLURM_GPUS_ON_NODE": "8", "SLURM_SUBMIT_DIR": str(submitted),
        }  # fmt: skip
        return start(script, "dir/model", *arguments, **{**slurm, **environment})

    def calls(name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(**json.loads(path.read_text())) for path in sorted(records.glob(f"{name}-*.json"))]

    return SimpleNamespace(put=put, start=start, job=job, calls=calls, records=records, folder=submitted)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """Wait for a launcher, and return what it wrote to stderr."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, output + errors
    return errors


def option(arguments: list[str], name: str) -> str:
    assert arguments.count(name) == 1
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("path", [SINGLE_NODE, SLURM], ids=lambda path: path.stem)
def test_launcher_passes_shellcheck_and_prints_help(machine, path):
    assert os.access(path, os.X_OK)
    subprocess.run([Path(sys.executable).parent / "shellcheck", path], check=True)
    finish(machine.start(path, "--help"))


def test_server_and_trainer_run_on_a_cpu_without_gpus(machine):
    port = str(free_port())
    arguments = ["--port", port, "--", "--output_dir", "my out", "--", "--max-model-len", "4096"]
    finish(machine.start(SINGLE_NODE, "dir/model", *arguments))
    (server,), (trainer,) = machine.calls("trl-april"), machine.calls("accelerate")
    assert server.arguments == ["serve", "dir/model", "--port", port, "--max-model-len", "4096"]
    assert trainer.arguments == [
        "launch", "--config_file", str(SCRIPTS / "accelerate" / "cpu_ddp.yaml"), "--num_processes", "1",
        str(SCRIPTS / "grpo.py"), "--model_name_or_path", "dir/model",
        "--vllm_server_base_url", f"http://127.0.0.1:{port}", "--bf16", "false", "--output_dir", "my out",
    ]  # fmt: skip
    assert trainer.environment["ACCELERATE_USE_CPU"] == "true"
    assert (machine.records / "server-stopped").exists()


@pytest.mark.parametrize(
    ("tool", "options", "environment", "server_gpus", "trainer_gpus"),
    [
        ("nvidia-smi", ["--", "--", "--dtype", "half"], {"FIT": "2"}, "0,1 2,3", "4,5,6,7"),
        ("nvidia-smi", ["--", "--", "-tp", "4"], {}, "0,1,2,3", "4,5,6,7"),
        ("nvidia-smi", ["--", "--", "-dp=4"], {}, "0,1,2,3", "4,5,6,7"),
        ("nvidia-smi", ["--", "--", "--tensor_parallel_size=4"], {}, "0,1,2,3", "4,5,6,7"),
        ("nvidia-smi", ["--server-gpus", "1"], {"CUDA_VISIBLE_DEVICES": "3,5,7"}, "3", "5,7"),
        ("amd-smi", [], {"HIP_VISIBLE_DEVICES": "1,3"}, "1", "3"),
        ("amd-smi", [], {"ROCR_VISIBLE_DEVICES": "2,3"}, "0", "1"),
    ],
)
def test_gpus_are_divided(machine, tool, options, environment, server_gpus, trainer_gpus):
    """A server gets as many as its weights need."""
    machine.put(tool, GPUS[tool].format(count=8))
    finish(machine.start(SINGLE_NODE, "dir/model", "--port", str(free_port(2)), *options, **environment))
    servers, (trainer,) = machine.calls("trl-april"), machine.calls("accelerate")
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")  # vLLM on ROCm refuses two lists that differ
    visible, other = names if tool == "nvidia-smi" else reversed(names)
    by_port = sorted(servers, key=lambda server: int(option(server.arguments, "--port")))
    assert [server.environment[visible] for server in by_port] == server_gpus.split()
    assert trainer.environment[visible] == trainer_gpus
    assert not any(other in call.environment for call in (*servers, trainer))
    addresses = [f"http://127.0.0.1:{option(server.arguments, '--port')}" for server in by_port]
    assert option(trainer.arguments, "--vllm_server_base_url") == ",".join(addresses)
    assert option(trainer.arguments, "--num_processes") == str(len(trainer_gpus.split(",")))
    if "FIT" not in environment:
        assert "--tensor-parallel-size" not in servers[0].arguments
        return
    asked = "0,1,2,3 -P -m trl_april.server.model_size dir/model 4 --dtype half"
    assert (machine.records / "fit").read_text().strip() == asked
    assert [option(server.arguments, "--tensor-parallel-size") for server in servers] == ["2", "2"]


def test_each_server_of_a_node_has_gpus_and_a_port_of_its_own(machine):
    """The last nodes have servers, and the trainer has the others."""
    port = free_port(2)
    arguments = ["--server-nodes", "2", "--server-address", "127.0.0.1,127.0.0.2", "--port", str(port)]
    arguments += ["--", "--output_dir", "my out", "--", "--seed", "3"]
    environment = {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "3,4,6,7", "FIT": "2"}
    finish(machine.job(*arguments, nodes="n1,n2,n3,n4", **environment))
    servers = sorted(machine.calls("trl-april"), key=lambda call: call.arguments[-4:])
    where = [(host, port + number) for host in ("127.0.0.1", "127.0.0.2") for number in range(2)]
    for call, (host, own_port) in zip(servers, where, strict=True):
        assert call.arguments == [
            "serve", "dir/model", "--tensor-parallel-size", "2", "--seed", "3", "--host", host, "--port",
            str(own_port),
        ]  # fmt: skip
        gpus = "3,4" if own_port == port else "6,7"
        assert call.environment["CUDA_VISIBLE_DEVICES"] == call.environment["HIP_VISIBLE_DEVICES"] == gpus
    ranks = sorted(machine.calls("accelerate"), key=lambda call: option(call.arguments, "--machine_rank"))
    addresses = ",".join(f"http://{host}:{own_port}" for host, own_port in where)
    assert [call.arguments for call in ranks] == [
        [
            "launch", "--machine_rank", rank, "--config_file", "scripts/accelerate/ddp.yaml",
            "--num_machines", "2", "--num_processes", "8", "--main_process_ip", "n1", "--main_process_port", "29500",
            "--rdzv_backend", "static", "--same_network", "scripts/grpo.py", "--model_name_or_path", "dir/model",
            "--vllm_server_base_url", addresses, "--output_dir", "my out",
        ]
        for rank in "01"
    ]  # fmt: skip
    serving, training = machine.calls("srun")
    assert {"--nodelist=n3,n4", "--nodes=2", "--ntasks=2", "--export=ALL"} <= set(serving.arguments)
    assert {"--nodelist=n1,n2", "--nodes=2", "--ntasks=2", "--export=ALL"} <= set(training.arguments)
    assert (machine.records / "server-stopped").exists() and not machine.calls("ray")
    # Every user of a node sees command lines.
    key = servers[0].environment["VLLM_API_KEY"]
    assert len(key) >= 32 and ranks[0].environment["VLLM_API_KEY"] == key
    assert not any(key in word for name in ("srun", "trl-april", "accelerate") for call in machine.calls(name)
                   for word in call.arguments)  # fmt: skip


@pytest.mark.parametrize("flag", ["--data-parallel-size", "--data_parallel_size", "-dp"])
def test_several_server_nodes_are_joined_by_ray(machine, flag):
    finish(machine.job(
        "--server-nodes", "2", "--server-address", "::1", "--port", port := str(free_port()), "--gpus-per-node", "4",
        "--", "--weight_sync", "filesystem", "--weight_sync_dir", "/shared/weights",
        "--", flag, "2", nodes="n1,n2,n3,n4,n5",
    ))  # fmt: skip
    for call in machine.calls("ray"):  # the same on both nodes: Ray finds the first one
        assert call.arguments[:8] == [
            "symmetric-run", "--address", "[::1]:6379", "--min-nodes", "2", "--num-gpus", "4", "--",
        ]  # fmt: skip
    assert len(machine.calls("ray")) == 2
    (server,) = machine.calls("trl-april")
    assert server.arguments[-6:] == [  # by default vLLM expects all copies on the first node
        "--data-parallel-backend", "ray", "--data-parallel-address", "::1", flag, "2",
    ]  # fmt: skip
    trainer = machine.calls("accelerate")[0].arguments
    assert option(trainer, "--num_processes") == "12"
    assert option(trainer, "--vllm_server_base_url") == f"http://[::1]:{port}"


@pytest.mark.parametrize(
    ("launcher", "arguments", "environment", "reason"),
    [
        (SINGLE_NODE, [], {}, "the model is left out"),
        (SINGLE_NODE, ["m", "--log", "missing/x.log"], {}, "--log is 'missing/x.log', but it must be a file"),
        (SINGLE_NODE, ["m"], {"COUNT": "1"}, "one GPU was found (0), but server and trainer need one each"),
        (SINGLE_NODE, ["m", "--server-gpus", "4"], {"COUNT": "4"}, "--server-gpus is 4 of 4"),
        (SINGLE_NODE, ["m"], {"COUNT": "4"}, "how many servers fit on the GPUs is not known"),
        (SLURM, [], {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        (SLURM, [], {"SLURM_SUBMIT_DIR": "/"}, "there is no scripts/grpo.py in /"),
        (SLURM, ["--server-nodes", "3"], {}, "the job has 3 nodes, and --server-nodes is 3"),
        (SLURM, ["--", "--weight_sync", "filesystem"], {}, "--weight_sync is filesystem without --weight_sync_dir"),
    ],
)
def test_invalid_launch_is_refused_with_a_reason(machine, launcher, arguments, environment, reason):
    if count := environment.get("COUNT"):
        machine.put("nvidia-smi", GPUS["nvidia-smi"].format(count=count))
    start = machine.job if launcher is SLURM else partial(machine.start, launcher)
    assert f"{launcher.name}: error: {reason}" in finish(start(*arguments, FIT="", **environment), code=1)
    assert not machine.calls("trl-april")


@pytest.fixture(params=[SINGLE_NODE, SLURM], ids=lambda path: path.stem)
def launch(request, machine):
    """Starts one of the launchers with one server."""
    arguments = ["--server-address", "127.0.0.1", "--servers", "1"]
    start = partial(machine.job, *arguments) if request.param is SLURM else partial(machine.start, SINGLE_NODE, "m")
    return partial(start, "--port", str(free_port()))


@pytest.mark.parametrize(
    ("environment", "code", "message"),
    [({"TRAINER": "7"}, 7, ""), ({"SERVER": "dies"}, 1, "the server ended while it was starting")],
)
def test_failure_ends_the_launch_with_its_exit_code(machine, launch, environment, code, message):
    assert message in finish(launch(**environment), code)
    assert bool(machine.calls("accelerate")) == (machine.records / "server-stopped").exists() == (code == 7)


def test_trainer_has_time_to_save_despite_further_signals(machine, launch):
    process = launch(TRAINER="saves")
    for name in ("trainer-runs", "trainer-saves"):
        deadline = time.monotonic() + 30
        while not (machine.records / name).exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
    finish(process, 143)
    saved, stopped = (machine.records / name for name in ("trainer-saved", "server-stopped"))
    assert saved.stat().st_mtime_ns < stopped.stat().st_mtime_ns
    for call in machine.calls("accelerate"):  # torchrun's default is 30 seconds
        assert call.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "600"
