"""Which model families train exactly: the log-probabilities that the server recorded against those of the trainer.

    python benchmarks/models.py                              # all families, about a minute each, into models.json
    python benchmarks/models.py llama "gemma 2"              # some of them
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
import copy
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from model_families import FAMILIES, build
from report import markdown, read_json, replace_text, write_json


EXACT = 2e-5  # nats; rounding in float32 is some 1e-6, and more where log-probabilities are below -10
TIME_LIMIT = 600.0  # seconds of a family
STEPS = 4  # of a training
LENGTHS = (40, 90, 150, 250)  # tokens of the completions of groups 0 to 3, 4 to 7 and so on, so that some are cut
CUT = {"over_provisioning": 2.0, "overlap_generation": False, "resume_kv": "recompute"}
KEPT = {"over_provisioning": 3.0, "overlap_generation": True, "resume_kv": "keep"}
TRAININGS: dict[str, dict[str, Any]] = {  # the first three share a server
    "cut": CUT,
    "kept": KEPT,
    "merged": {**CUT, "weight_sync": "filesystem"},
    "adapter": {**KEPT, "weight_sync": "auto"},
}
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


# One family, in a process of its own


def measure(name: str, path: Path) -> None:
    """Train a family in each way, and write what was found after each training."""
    import torch

    from trl_april import APRILGRPOConfig

    torch.set_num_threads(1)
    folder = path.parent / "model"
    reference, options, make_prompt = build(name, folder)
    found: dict[str, Any] = {}
    servers = []  # held, so that the next training takes over the server
    for training, schedule in TRAININGS.items():
        config = APRILGRPOConfig(
            str(path.parent / "trainer"), vllm_mode="colocate", num_generations=4, per_device_train_batch_size=8,
            max_steps=STEPS, max_completion_length=max(LENGTHS), generation_kwargs={"ignore_eos": True},
            learning_rate=1e-2, disable_dropout=True, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
            disable_tqdm=True, seed=3, **{**schedule, **options},
        )  # fmt: skip
        with noted_warnings() as warnings:
            try:
                found[training] = train(training, str(folder), config, reference, make_prompt, servers)
            except Exception as error:
                found[training] = {"error": f"{type(error).__name__}: {error}"}
        found[training]["warnings"] = warnings
        path.write_text(json.dumps(found))
        print(training, json.dumps(found[training])[:2000], flush=True)
        if "error" in found["cut"]:
            return  # nor would the others work


@contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """The warnings of our own loggers."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("trl_april").addHandler(handler)
    yield found
    logging.getLogger("trl_april").removeHandler(handler)


def train(
    training: str, folder: str, config: Any, reference: Any, make_prompt: Any, servers: list[Any]
) -> dict[str, Any]:
    """One training, and its differences."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from trl_april import APRILGRPOTrainer
    from trl_april.engine.protocol import RequestMaker
    from trl_april.training.forward_pass import base_attention

    class Measured(APRILGRPOTrainer):
        """Compares every batch."""

        def _run_round(self) -> Any:
            self.done = super()._run_round()
            model = self.model
            if hasattr(model, "merge_and_unload"):
                model = copy.deepcopy(model).merge_and_unload()
            models[self.done.version] = copy.deepcopy(reference)
            models[self.done.version].load_state_dict(model.state_dict())
            return self.done

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            passes = {}
            base, name = base_attention(self.model), self.model.config._attn_implementation
            with torch.no_grad():
                passes["blocks" if base else "side by side"] = self._training_pass(output)
                if base:
                    self.model.config._attn_implementation = base
                    passes["side by side"] = self._training_pass(output)
                    self.model.config._attn_implementation = name
                samples = [(group, sample) for group in self.done.groups for sample in group.samples]
                for row, (group, sample) in enumerate(samples):
                    recorded = torch.tensor(sample.logprobs.tolist())
                    alone = row_alone(models, group.prompt_ids, sample, mixes=training == "kept")
                    note("alone", alone, recorded)
                    # Keys and values of kept requests are of earlier versions.
                    current = [one.version == self.done.version for one in sample.segments for _ in range(one.length)]
                    of = torch.tensor(current) & (training != "kept" or all(current))
                    for name, logps in passes.items():
                        note(name, logps[row, : len(recorded)][of], recorded[of])
                    found["tokens"] += len(recorded)
                    found["continued"] += len(sample.segments) > 1
            return output

        def _training_pass(self, output: dict[str, Any]) -> Any:
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
            kept = output["completion_ids"].size(1)
            return self._get_per_token_logps_and_entropies(self.model, ids, mask, kept, batch_size=4)[0]

    def note(name: str, left: Any, right: Any) -> None:
        if len(right):
            found[name] = max(found.get(name, 0.0), float((left - right).abs().max()))

    make = RequestMaker.make

    def limited(maker: RequestMaker, group: Any, sample: Any, version: int) -> Any:
        left = LENGTHS[group.group_id % len(LENGTHS)] - len(sample)
        return replace(make(maker, group, sample, version), max_tokens=left)

    models: dict[int, Any] = {}
    found: dict[str, Any] = {"tokens": 0, "continued": 0}
    trainer = Measured(
        model=folder, args=config, train_dataset=Dataset.from_list([make_prompt(number) for number in range(32)]),
        reward_funcs=lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        peft_config=LoraConfig(r=8, target_modules="all-linear") if training in ("merged", "adapter") else None,
    )  # fmt: skip
    servers[:] = [trainer]
    with patch.object(RequestMaker, "make", limited):
        trainer.train()
    return {**found, "weight_sync": trainer.vllm_generation.weight_sync}


def row_alone(models: dict[int, Any], prompt_ids: list[int], sample: Any, *, mixes: bool) -> Any:
    """Log-probabilities of a completion, each segment under its own weights.

    With `mixes`, keys, values and states are those of the versions that computed them. A later segment then takes one
    position at a time, since not every model continues from a state with several.
    """
    import torch

    ids = torch.tensor([[*prompt_ids, *sample.token_ids]])
    end, found, cache = len(prompt_ids), [], None
    for segment in sample.segments:
        begin, end, model = end, end + segment.length, models[segment.version]
        if not mixes or len(sample.segments) == 1:
            logits = model(input_ids=ids[:, : end - 1], use_cache=False).logits[0, begin - 1 :]
        elif cache is None:
            output = model(input_ids=ids[:, : end - 1], use_cache=True)
            logits, cache = output.logits[0, begin - 1 :], output.past_key_values
        else:
            steps = range(begin - 1, end - 1)
            of_steps = [model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True) for at in steps]
            logits = torch.cat([one.logits[0] for one in of_steps])
        found.append(logits.float().log_softmax(-1).gather(-1, ids[0, begin:end, None])[:, 0])
    return torch.cat(found)


# All families


def run(name: str, time_limit: float) -> dict[str, Any]:
    """Measure a family in a process of its own, and return what it found."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory(prefix="trl_april_models_") as folder:
        path, log = Path(folder, "found.json"), Path(folder, "log")
        with log.open("wb") as output:
            command = [sys.executable, __file__, "--one", str(path), name]
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                code = child.wait(time_limit)
            except BaseException as error:
                child.send_signal(signal.SIGTERM)  # its server ends with it
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
    is_served = any(one.get("tokens") for one in trainings.values())
    has_blocks = any("blocks" in one for one in full)
    return [
        result["name"],
        "yes" if is_served else "no",
        most(full, "alone"),
        most(full, "blocks", "side by side"),
        ("yes" if has_blocks else "no") if is_served else "",
        most([trainings["merged"]], "alone", "blocks", "side by side"),
        most([trainings["adapter"]], "alone", "blocks", "side by side"),
        " ".join(notes(found)).replace("|", "/"),
    ]


def most(parts: list[dict[str, Any]], *keys: str) -> str:
    """The largest difference under one of the keys, where something was measured."""
    values = [part[key] for part in parts for key in keys if key in part]
    return "" if not values else "exact" if max(values) <= EXACT else f"{max(values):.0e}"


def notes(found: dict[str, Any]) -> list[str]:
    """Errors and warnings, each once."""
    said: dict[str, list[str]] = {}
    for name in TRAININGS:
        training = found.get(name, {})
        for text in [training.get("error", ""), *training.get("warnings", ())]:
            cause = re.search("Root cause: (.*)", text)
            text = " ".join((cause[1] if cause else text).split())
            # Of the policy's own changes, which are fast here.
            if text and not text.startswith("Step "):
                said.setdefault(text if len(text) <= 400 else f"{text[:400]}...", []).append(name)
    lines = [text if len(names) > 1 else f"{names[0]}: {text}" for text, names in said.items()]
    return [*lines, *([found["error"]] if "error" in found else [])]


def table(results: list[dict[str, Any]]) -> str:
    order = list(FAMILIES)
    rows = [line_of(one) for one in sorted(results, key=lambda one: order.index(one["name"]))]
    header = ("model", "CPU server", "row alone", "training pass", "blocks", "LoRA, merged", "LoRA, adapter", "notes")
    return markdown(header, rows)


PAGE = """\
# Model families

Generated by `python benchmarks/models.py --write docs/models.md`: edit that, not this page.

Which models train exactly. Each is tiny, has random weights in float32, and was trained on a vLLM server on a CPU
({versions}). "exact" means that no token's difference is above {exact:g} nats; otherwise the largest one is given.

- **CPU server**: whether vLLM's build for CPUs serves it. Many others need a GPU, where they were not tried.
- **row alone**: recorded log-probabilities against transformers' own, with eager attention and without padding.
  Requests are cut and resumed in one training, and kept through weight syncs in the other.
- **training pass**: against those that the loss is computed from, in blocks and side by side.
- **blocks**: whether a training pass computes each prompt once.
- **LoRA**: both differences, with the weights merged for the server or with adapters alone.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(FAMILIES)}")
    parser.add_argument("--results", type=Path, default=Path("models.json"), help="file for all measurements")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page for the table")
    parser.add_argument("--again", action="store_true", help="measure families that are in the file, too")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="seconds of a family")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in FAMILIES]:
        parser.error(f"{', '.join(unknown)}: no such family. There are {', '.join(FAMILIES)}.")
    if options.one:
        return measure(options.names[0], options.one)
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
        replace_text(options.write, PAGE.format(versions=listed, exact=EXACT, table=found))


if __name__ == "__main__":
    main()
