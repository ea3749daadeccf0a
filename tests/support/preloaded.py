"""Runs `worker.py` in several processes that are forked from one with all imports done, which take ten seconds.

The environment is that of `accelerate launch` with the same configuration file. As with torchrun, the store for the
rendezvous is in the launching process.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command_parser,
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
)

from tests.support.fork_worker import Forker
from tests.support.launch import CONFIGS, Launch, free_port


def launch_preloaded(
    forker: Forker,
    num_processes: int,
    runs: list[dict[str, Any]],
    folder: Path,
    *,
    model: str,
    url: str,
    config: str = "cpu_ddp.yaml",
    timeout: float = 240,
    env: dict[str, str] | None = None,
) -> Launch:
    """As [`tests.support.launch.launch`]: run trainings, one after the other, in `num_processes` processes."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "spec.json"
    content = {"model": model, "url": url, "folder": str(folder), "runs": runs, "processes": num_processes}
    content["patience"] = timeout - 10
    spec.write_text(json.dumps(content))
    environment = {
        **_environment_of_accelerate(num_processes, config),
        **{"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
        **(env or {}),
    }
    launcher = forker.start("preloaded", spec, environment)
    try:
        output = launcher.communicate(timeout)
    finally:
        if launcher.returncode is None:
            os.killpg(launcher.pid, signal.SIGKILL)  # with its forks
    return Launch(launcher.returncode, output, folder, time.time(), launcher.pid)


def _environment_of_accelerate(num_processes: int, config: str) -> dict[str, str]:
    """The variables that `accelerate launch` adds to the environment."""
    options = ["--config_file", str(CONFIGS / config), "--num_processes", str(num_processes)]
    arguments = launch_command_parser().parse_args([*options, "--mixed_precision", "no", "script"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join([*defaults.deepspeed_config, "mixed_precision"])
        environment = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        environment = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


def main() -> None:
    """The launching process: exits with the exit code of the first process to fail."""
    from tests.support import worker

    os.setsid()
    children = []
    for rank in range(json.loads(Path(sys.argv[1]).read_text())["processes"]):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return worker.main()
        children.append(child)
    # After the forks, since it has threads; the others wait for it.
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, True, wait_for_workers=False)
    code = 0
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in children:  # as torchrun does
                os.kill(other, signal.SIGTERM)
    del store
    sys.exit(code)
