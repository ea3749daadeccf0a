"""Which model families train exactly: the log-probabilities that the server recorded against those of the trainer.

    python benchmarks/models.py                              # all families, about a minute each, into models.json
    python benchmarks/models.py Llama "Gemma 2"              # some of them
    python benchmarks/models.py --write docs/models.md       # and write the table of all in models.json

Each family is a tiny model with random weights in float32, which is trained on the server that the trainer starts for
it: with requests that are cut and resumed, with requests kept through weight syncs, with LoRA weights merged for the
server, and with adapters alone. The learning rate of 1e-2 changes all weights visibly in each step, prompts differ in
length, and most completions run beyond the sliding window and beyond the original positions of a scaled RoPE.

Two differences are measured, each the largest of a token in nats: of the recorded log-probabilities from transformers'
own (eager attention, one row at a time, without padding, under the weights of each token's policy version), and from
those of the training pass, in blocks and side by side, for tokens of the current version. In float32, rounding makes
some 1e-6 of each.

A family runs in a process of its own. One that is in the JSON file is not measured again: `--again` does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from model_families import FAMILIES, TRAININGS
from report import markdown, read_json, replace_text, write_json


EXACT = 2e-5  # nats; rounding in float32 is some 1e-6, and more where log-probabilities are below -10
TIME_LIMIT = 600.0  # seconds of a family
PACKAGES = ("vllm", "transformers", "trl", "torch", "peft")


def versions() -> dict[str, str]:
    """Of the packages that a difference may come from."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # vLLM's build for CPUs has another name
            found[name] = version(f"{name}-cpu")
    return found


def run(name: str, time_limit: float) -> dict[str, Any]:
    """Measure a family in a process of its own, and return what it found."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory(prefix="trl_april_models_") as folder:
        path, log = Path(folder, "found.json"), Path(folder, "log")
        with log.open("wb") as output:
            command = [sys.executable, Path(__file__).with_name("model_training.py"), name, path]
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                code = child.wait(time_limit)
            except BaseException as error:
                child.kill()  # its server ends with it
                child.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                code = -1
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if code:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            why = f"not finished after {time_limit:.0f} s" if code == -1 else f"exit code {code}: {lines[-1][:500]}"
            found["error"] = why
    return {"name": name, "found": found}


def line_of(result: dict[str, Any]) -> list[str]:
    """A row of the table."""
    found = result["found"]
    trainings = {one: found.get(one, {}) for one in TRAININGS}
    full = [trainings["cut"], trainings["kept"]]
    is_served = not trainings["cut"].get("error", "").startswith(("ServerError", "ConfigError"))  # of its start
    has_blocks = any("blocks" in one for one in full)
    return [
        result["name"],
        trainings["cut"] and ("yes" if is_served else "no") or "",
        most(full, "alone"),
        most(full, "blocks", "side by side"),
        most(full, "alone") and ("yes" if has_blocks else "no"),
        most([trainings["merged"]], "alone", "blocks", "side by side"),
        most([trainings["adapter"]], "alone", "blocks", "side by side")
        if trainings["adapter"].get("weight_sync") == "adapter"
        else "as merged" * bool(trainings["adapter"].get("tokens")),
        " ".join(notes(found)).replace("|", "/"),
    ]


def most(parts: list[dict[str, Any]], *keys: str) -> str:
    """The largest difference under one of the keys, where something was measured."""
    values = [part[key] for part in parts for key in keys if key in part]
    return "" if not values else "exact" if max(values) <= EXACT else f"{max(values):.0e}"


def notes(found: dict[str, Any]) -> list[str]:
    """The first sentence of each error and warning, once."""
    said: dict[str, None] = {}
    for name in TRAININGS:
        training = found.get(name, {})
        for text in [training.get("error", ""), *training.get("warnings", ())]:
            cause = re.search("Root cause: (.*)", text) or re.search("they compute otherwise. (.*)", text)
            text = re.sub(
                r" (of request [\w-]+|in the weight sync|to /v1/\S+|at http\S+)", "", cause[1] if cause else text
            )
            first = re.split(r"(?<=[a-z\d)])[.:] (?=[A-Z(])", " ".join(text.split()))
            text = first[1] if first[0].endswith(("Error", "instead of the adapter")) else first[0]
            # Not the policy's own changes, which are fast here, nor guesses at a cause and what has its cell.
            if text and not text.startswith(("Step ", "One of them may", "Merged weights are sent")):
                said[text if len(text) <= 200 else f"{text[:200]}..."] = None
    return [f"{text.rstrip('.')}." for text in said] + ([found["error"]] if "error" in found else [])


def table(results: list[dict[str, Any]]) -> str:
    order = list(FAMILIES)
    rows = [line_of(one) for one in sorted(results, key=lambda one: order.index(one["name"]))]
    header = ("model", "CPU server", "row alone", "training pass", "blocks", "LoRA, merged", "LoRA, adapter", "notes")
    return markdown(header, rows)


PAGE = """\
# Model families

Generated by `python benchmarks/models.py --write docs/models.md`: edit that, not this page.

Differences of log-probabilities by model family. Each model is tiny, has random weights in float32, and was trained on
a vLLM server on a CPU: {versions}. "exact" means that no
token differs by more than {exact:g} nats; otherwise the largest difference is given.

- **CPU server**: whether vLLM's build for CPUs serves it. Many other families need a GPU, where they were not tried.
- **row alone**: recorded log-probabilities compared with transformers', with eager attention and without padding. A
  training cuts and resumes requests, and another keeps them through weight syncs. Kept requests of MiniCPM 3 cannot be
  compared: vLLM caches its keys and values, and transformers the latents, which the new weights project again. Cut and
  resumed requests are exact.
- **training pass**: compared with the log-probabilities of the loss, in blocks and side by side.
- **blocks**: whether a training pass computes each prompt once.
- **LoRA**: both differences, with the weights merged for the server or with adapters alone. "as merged": the server
  cannot load the adapter, so merged weights are sent.

{table}

{missing}
"""
# Of families that have no line yet.
MISSING = (
    "Not measured on a server yet, but their training passes equal the model alone "
    "(tests/trainer/test_model_families.py): {}."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(FAMILIES)}")
    parser.add_argument("--results", type=Path, default=Path("models.json"), help="file for all measurements")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page for the table")
    parser.add_argument("--again", action="store_true", help="measure families that are in the file, too")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="seconds of a family")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in FAMILIES]:
        parser.error(f"{', '.join(unknown)}: no such family. There are {', '.join(FAMILIES)}.")
    results: dict[str, dict[str, Any]] = {}
    if options.results.exists():
        settings, earlier = read_json(options.results)
        results = {one["name"]: one for one in earlier if one["name"] in FAMILIES}
        if settings != versions():
            raise SystemExit(f"{options.results} was measured with {settings}. Choose another file with --results.")
    for name in options.names or FAMILIES:
        if name not in results or options.again:
            results[name] = run(name, options.time_limit)
            write_json(options.results, versions(), list(results.values()))
            print(" | ".join(line_of(results[name])), flush=True)
    found = table(list(results.values()))
    print(found)
    if options.write:
        listed = ", ".join(f"{name} {number}" for name, number in versions().items())
        left = "; ".join(name for name in FAMILIES if name not in results)
        missing = textwrap.fill(MISSING.format(left), 120) if left else ""
        page = PAGE.format(versions=listed, exact=EXACT, table=found, missing=missing)
        replace_text(options.write, page.rstrip() + "\n")


if __name__ == "__main__":
    main()
