"""The round trip of weights: the server's own, sent to it the way that training sends them.

The invariant owned here: the server holds the same weights and reports the same weight version after it as before, and
nothing is sent to a server that holds other weights than those of its model's folder, unless that is asked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging
from trl.trainer.utils import create_model_from_path

from ..canary import (
    TOLERANCE_FLOAT32,
    TOLERANCE_OTHER,
    VISIBLE_FLOAT32,
    VISIBLE_OTHER,
    Canary,
    distance,
    server_logprobs,
    trainer_logprobs,
)
from ..processes import OneProcess
from ..server_check import get_json
from ..weight_files import weight_folder
from ..weight_sync import ServerGeneration
from .environment import GIB, model_bytes
from .finding import Finding, Mark
from .server import Server


UNTRAINED = "default"  # what a server reports that no weights were sent to


def check_weight_sync(server: Server, *, folder: str, is_default: bool, forced: bool) -> Finding:
    """Send the server the weights that it has.

    Args:
        server ([`Server`]):
            The server.
        folder (`str`):
            Where weights are written, for as long as it takes.
        is_default (`bool`):
            Whether that is shared memory, or a folder that was chosen.
        forced (`bool`):
            Whether to do so even if that takes the weights of a training run away.
    """
    version = str(get_json(server.session, f"{server.base_url}/weight_info")["weight_version"])
    if version != UNTRAINED and not forced:
        return Finding(
            Mark.SKIP,
            f"the server holds weights of a training run (version {version!r}), which would be overwritten; --sync "
            "does so all the same",
        )
    if server.described["model_config"].get("quantization") is not None:
        return Finding(Mark.SKIP, "the server's weights are quantized, and cannot be compared with those of a file")
    path = server.model or server.served_path
    dtype = str(server.described["model_config"]["dtype"]).removeprefix("torch.")
    size, memory = model_bytes(path) or 0, psutil.virtual_memory().available
    if size > memory:
        return Finding(
            Mark.SKIP, f"{path} is {size / GIB:.1f} GiB, and {memory / GIB:.1f} GiB of memory are free to load it here"
        )
    try:
        with _no_progress_bars():
            model = create_model_from_path(path, dtype=dtype, device_map=None, local_files_only=True)
    except (OSError, ValueError) as error:
        return Finding(
            Mark.WARN,
            f"not tried: the weights of {path} cannot be loaded here ({(str(error).splitlines() or [error])[0]})",
            "name a folder with the model that is served: --model DIR",
        )
    size, free = sum(param.nbytes for param in model.parameters()), shutil.disk_usage(folder).free
    if size > free:
        return Finding(
            Mark.FAIL,
            f"the weights are {size / GIB:.1f} GiB, and {folder} has {free / GIB:.1f} GiB free",
            "enlarge it (docker run --shm-size), or name another folder that the server sees: --weight-sync-dir DIR",
        )
    return _round_trip(server, model, version, folder=folder, is_default=is_default, forced=forced)


def _round_trip(
    server: Server, model: PreTrainedModel, version: str, *, folder: str, is_default: bool, forced: bool
) -> Finding:
    exact = model.dtype == torch.float32
    token_ids = Canary(model.config.get_text_config().vocab_size, exact=exact).token_ids
    expected = trainer_logprobs(model, token_ids, torch.device("cpu"))
    before = server_logprobs(server.session, server.base_url, server.name, token_ids)
    apart = distance(expected, before)
    # Not `>`: what is not a number is no agreement.
    if not apart <= (TOLERANCE_FLOAT32 if exact else TOLERANCE_OTHER) and not forced:
        return Finding(
            Mark.WARN,
            f"nothing was sent: the log-probabilities of the server and of transformers with "
            f"{server.model or server.served_path} differ by {apart:.3g} nats in the mean, so the server holds other "
            "weights, as of a training run that does not set a version, or computes something else",
            "name the folder that it serves (--model DIR), start it anew, or overwrite what it holds with --sync",
        )
    # In a folder of our own, which goes with this process even if the server never answers.
    with weight_folder(None if is_default else folder) as place:
        generation = ServerGeneration(
            model=model,
            accelerator=Accelerator(cpu=True),
            processing_class=None,
            processes=OneProcess(),
            trained_model=lambda: model,
            # The version that it has: whatever happens from here on, there is none to be put back.
            policy_version=lambda: version,
            weight_sync="filesystem",
            weight_sync_dir=str(place),
            needs_logprobs=False,
            api_key=server.session.api_key,
            server_base_url=server.base_url,
            server_timeout=server.session.seconds,
            max_completion_length=1,
        )
        generation.session = server.session
        generation.sync_weights()  # compares afterwards, and raises where the two sides differ
    after = server_logprobs(server.session, server.base_url, server.name, token_ids)
    apart, moved = distance(expected, after), distance(before, after)
    found = f"{generation.sync_seconds:.2f} s through {folder}; server and transformers differ by {apart:.1e} nats"
    data = {"weight_sync_seconds": generation.sync_seconds}
    if moved > (VISIBLE_FLOAT32 if exact else VISIBLE_OTHER):
        return Finding(
            Mark.WARN,
            f"{found}, but the server's own changed by {moved:.3g}: it held other weights before",
            "if somebody trains with this server, tell them",
            data,
        )
    return Finding(Mark.OK, found, data=data)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
