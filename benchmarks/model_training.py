"""Training one family of `models.py`, and comparing every batch. Run by that script: NAME FILE."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from model_families import TRAININGS, build, make_row
from peft import LoraConfig
from report import replace_text

from trl_april import APRILGRPOConfig, APRILGRPOTrainer
from trl_april.engine.protocol import RequestMaker
from trl_april.training.forward_pass import base_attention


STEPS = 4  # of a training
LENGTHS = (40, 90, 150, 250)  # tokens of the completions of groups 0 to 3, 4 to 7 and so on, so that some are cut


def measure(name: str, path: Path) -> None:
    """Train a family in each way, and write what was found after each training."""
    torch.set_num_threads(1)
    folder = path.parent / "model"
    reference, options = build(name, folder)
    found: dict[str, Any] = {}
    servers = []  # held, so that the next training takes over the server
    for training, schedule in TRAININGS.items():
        config = APRILGRPOConfig(
            str(path.parent / "trainer"), vllm_mode="colocate", num_generations=4, per_device_train_batch_size=8,
            max_steps=STEPS, max_completion_length=max(LENGTHS), generation_kwargs={"ignore_eos": True},
            learning_rate=1e-2, disable_dropout=True, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
            disable_tqdm=True, seed=3, vllm_server_timeout=60, **{**schedule, **options},
        )  # fmt: skip
        with noted_warnings() as warnings:
            try:
                found[training] = train(training, str(folder), config, reference, servers)
            except Exception as error:
                # Without the log of the server, which has paths of this machine.
                found[training] = {"error": f"{type(error).__name__}: {error}".split("\nWhole log")[0]}
        found[training]["warnings"] = warnings
        replace_text(path, json.dumps(found))
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


def train(training: str, folder: str, config: Any, reference: Any, servers: list[Any]) -> dict[str, Any]:
    """One training, and its differences."""

    class Measured(APRILGRPOTrainer):
        """Compares every batch."""

        def _april_run_round(self) -> Any:
            self.done = super()._april_run_round()
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
                # Kept requests have keys and values of earlier versions, unless those are of an adapter of their own.
                mixes = config.resume_kv == "keep" and self.vllm_generation.weight_sync != "adapter"
                samples = [(group, sample) for group in self.done.groups for sample in group.samples]
                for row, (group, sample) in enumerate(samples):
                    recorded = torch.tensor(sample.logprobs.tolist())
                    alone = row_alone(models, group.prompt_ids, sample, mixes=mixes)
                    note("alone", alone, recorded)
                    current = [one.version == self.done.version for one in sample.segments for _ in range(one.length)]
                    of = torch.tensor(current) & (not mixes or all(current))
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
        model=folder, args=config, train_dataset=Dataset.from_list([make_row(number) for number in range(32)]),
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


if __name__ == "__main__":
    measure(sys.argv[1], Path(sys.argv[2]))
