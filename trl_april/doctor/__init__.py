"""The doctor: is this machine ready to train, and is that server? `trl-april doctor` asks.

Nothing that it does to a server harms others: its requests have ids of their own, only those are aborted, and what
would load the server or change its weights is not done while somebody uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ConfigError
from ..output_paths import check_file
from .examination import Examination
from .finding import Finding, Mark


SYNC_SECONDS = 1800.0  # for a large model to be read and written on a slow disk


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What is to be examined.

    Args:
        base_url (`str`, *optional*):
            Server to examine. The environment only if it is left out.
        model (`str`, *optional*):
            Folder or id of the model that is to be trained. The one that the server serves if it is left out.
        json_file (`str`, *optional*):
            Where everything that was found is written as JSON.
        max_completion_length (`int`, *optional*, defaults to `512`):
            Tokens that completions will have at most; the default is TRL's.
        weight_sync_dir (`str`, *optional*):
            As in [`APRILGRPOConfig`]: where weights travel through files. Shared memory if it is left out.
        max_sequences (`int`, *optional*, defaults to `64`):
            Sequences at once up to which decoding is measured.
        decode_seconds (`float`, *optional*, defaults to `1.0`):
            Seconds that each of these measurements should take. Less is quicker and less exact.
        timeout (`float`, *optional*, defaults to `30.0`):
            Seconds of silence after which an answer is given up.
        sync (`bool`, *optional*, defaults to `False`):
            Whether to send the server its model's weights even if it holds those of a training run.
    """

    base_url: str | None = None
    model: str | None = None
    json_file: str | None = None
    max_completion_length: int = 512
    weight_sync_dir: str | None = None
    max_sequences: int = 64
    decode_seconds: float = 1.0
    timeout: float = 30.0
    sync: bool = False

    def __post_init__(self) -> None:
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--base-url is {self.base_url!r}, but it must begin with http:// or https://, such as "
                "http://127.0.0.1:8000."
            )
        for name, seconds in (("--timeout", self.timeout), ("--decode-seconds", self.decode_seconds)):
            if not seconds > 0:
                raise ConfigError(f"{name} is {seconds}, but it must be a positive number of seconds.")
        for name in ("max_completion_length", "max_sequences"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}, but it must be at least 1.")
        if self.json_file is not None:
            check_file("--json", self.json_file)


def run(options: DoctorOptions) -> int:
    """
    Runs all checks, and prints a line for each.

    Args:
        options ([`DoctorOptions`]):
            What is to be examined.

    Returns:
        `int`: Exit code: 1 if something was found that training cannot live with, 0 otherwise.
    """
    examination = Examination()
    examine_environment(examination, options)
    if options.base_url is None:
        examination.add(
            "server",
            Finding(
                Mark.SKIP,
                "not checked. Start one with `trl-april serve MODEL`, and run `trl-april doctor --base-url "
                "http://127.0.0.1:8000`",
            ),
        )
    elif examination.findings["imports"].mark is Mark.FAIL:
        examination.add("server", Finding(Mark.SKIP, "not checked, because of: imports"))
    else:
        examine_server(examination, options, options.base_url.rstrip("/"))
    if options.json_file is not None:
        examination.write(Path(options.json_file), trl_april=__version__, base_url=options.base_url)
    return 1 if examination.failed else 0


def examine_environment(examination: Examination, options: DoctorOptions) -> None:
    """Check what is here."""
    from . import environment as here
    from .packages import check_others, check_package, installed_packages

    check = partial(examination.check, seconds=here.PROBE_SECONDS + 10)
    check("python", here.check_python)
    packages = installed_packages()
    for name in ("trl", "vllm", "transformers", "torch", "accelerate", "peft"):
        check(name, partial(check_package, name, packages))
    check("other packages", partial(check_others, packages))
    facts: dict[str, Any] = {}

    def check_imports() -> Finding:
        facts.update(here.run_probe())
        return here.check_imports(facts)

    check("imports", check_imports)
    check("devices", partial(here.check_devices, facts))
    folder, is_default = sync_folder(options)

    def check_sync_folder() -> Finding:
        return here.check_sync_folder(folder, is_default=is_default, needed=here.model_bytes(options.model))

    check("weight files", check_sync_folder)
    check("open files", here.check_open_files)


def sync_folder(options: DoctorOptions) -> tuple[str, bool]:
    """Where weights travel through files, and whether that is the default."""
    from .environment import shared_memory

    return options.weight_sync_dir or shared_memory(), options.weight_sync_dir is None


def examine_server(examination: Examination, options: DoctorOptions, base_url: str) -> None:
    """Check what is there."""
    # These need requests and transformers, of which it is known by now that they can be imported.
    from . import generation, speed
    from . import server as there
    from .packages import installed_packages, server_versions
    from .session import TimedSession

    session = TimedSession(options.timeout, os.environ.get("VLLM_API_KEY"))
    server = there.Server(base_url, session, options.model)

    def check(name: str, what: Callable[..., Finding], *arguments: Any, after: list[str], seconds: float = 0) -> None:
        # Silence ends a check sooner. This ends one whose answers trickle in, and one that does more takes longer.
        seconds += 20 * options.timeout + 10
        examination.check(name, partial(what, server, *arguments), after=after, seconds=seconds)

    check("server", there.check_health, after=[])
    check("access", there.check_access, after=["server"])
    check("version", there.check_version, server_versions(installed_packages()), after=["server"])
    check("endpoints", there.check_endpoints, after=["access"])
    check("configuration", there.check_configuration, after=["endpoints"])
    check("flags", there.check_flags, after=["configuration"])
    check("requests kept", there.check_keeping, after=["configuration"])
    check("model", there.check_model, after=["configuration"])
    check("log-probabilities", there.check_logprobs, after=["configuration"])
    check("context", there.check_room, options.max_completion_length, after=["configuration"])
    check("streaming", generation.check_streaming, after=["configuration"])
    check("abort", generation.check_abort, after=["streaming"])
    check("round trip", there.check_round_trip, after=["server"])
    check("other requests", there.check_idle, after=["server"])
    alone = ["streaming", "other requests"]
    check(
        "decode speed",
        speed.check_decode,
        options.max_sequences,
        speed.CURVE_SECONDS,
        options.decode_seconds,
        after=alone,
        seconds=speed.CURVE_SECONDS,
    )
    check("prefill speed", speed.check_prefill, after=alone)
    check(
        "weight sync",
        partial(_check_weight_sync, options),
        after=["model", "streaming"] if options.sync else ["model", *alone],
        seconds=SYNC_SECONDS,
    )
    session.close()


def _check_weight_sync(options: DoctorOptions, server: Any) -> Finding:
    # It brings all of TRL along, which the others do without.
    from .sync import check_weight_sync

    folder, is_default = sync_folder(options)
    return check_weight_sync(server, folder=folder, is_default=is_default, forced=options.sync)
