"""Training on two tasks of reasoning-gym with and without APRIL, over several seeds.

    python benchmarks/tasks.py gcd                # 5 seeds of 40 steps, synchronous and with default options
    python benchmarks/tasks.py countdown --april-steps 65   # about equal wall-clock
    python benchmarks/tasks.py gcd --quick        # a few steps, as a smoke test

`gym_tasks.py` has the tasks and the model. The first run of a task trains the model on worked solutions, which takes
minutes, and keeps it in --output-dir. A stopped benchmark resumes. Rewards are reasoning-gym's. After each training,
the copies of its weights are loaded into the vLLM server, which samples an answer to each held-out question.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import requests
import torch
import transformers
from countdown import Recording, save, train
from demo import STANDARD
from expected_reward import ExpectedReward
from gym_tasks import HELD_OUT_SEED, MAX_LENGTH, TASKS, GymTask, build_model, build_tokenizer, warm_start
from learning import Bench, Recorder, RecordingTrainer, Sizes, measure, prepare, schedule, training_parser
from learning_comparison import APRIL, SYNCHRONOUS, tables

from trl_april import LocalServer


HELD_OUT = 256  # questions per point of a curve
LEARNING_RATE = 1e-4


class GymBench(Bench):
    """Runs on a task of reasoning-gym."""

    def __init__(self, task: GymTask, sizes: Sizes, learning_rate: float, model_dir: Path, base_url: str) -> None:
        self.task, self.learning_rate = task, learning_rate
        rows = task.dataset(HELD_OUT, HELD_OUT_SEED)
        self.questions, self.entries = list(rows["prompt"]), list(rows["entry"])
        super().__init__(sizes, transformers.AutoModelForCausalLM.from_pretrained(model_dir), model_dir, base_url)

    def train(self, recipe: str, seed: int, mode: str, steps: int, recorder: Recorder) -> tuple[Recording, Any]:
        return train(
            mode,
            model_dir=self.model_dir,
            dataset=self.task.dataset(4 * steps * STANDARD.groups, seed),
            base_url=self.base_url,
            output_dir=self.model_dir.parent / "trainer",
            reward_funcs=self.task.reward(),
            make_trainer=partial(RecordingTrainer, recorder=recorder),
            max_steps=steps,
            seed=seed,
            num_generations=STANDARD.num_generations,
            per_device_train_batch_size=STANDARD.micro_batch_size,
            gradient_accumulation_steps=STANDARD.groups * STANDARD.num_generations // STANDARD.micro_batch_size,
            max_completion_length=self.task.max_completion_length,
            learning_rate=self.learning_rate,
            lr_scheduler_type="constant",
            scale_rewards="batch",  # reasoning-gym gives a little for some wrong answers
            **({"over_provisioning": 1.0} if mode == SYNCHRONOUS else {}),
        )

    def evaluate(self, model: Any) -> ExpectedReward:
        folder = self.model_dir.parent / "evaluated"
        model.save_pretrained(folder)
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
        self._post("collective_rpc", load)
        self._post("reset_prefix_cache", {})  # it was computed with other weights
        shutil.rmtree(folder)
        asked = {
            "model": str(self.model_dir), "prompt": self.tokenizer(self.questions)["input_ids"], "temperature": 1.0,
            "max_tokens": self.task.max_completion_length,
        }  # fmt: skip
        choices = sorted(self._post("v1/completions", asked)["choices"], key=lambda choice: choice["index"])
        scores = self.task.reward()([choice["text"] for choice in choices], self.entries)
        return ExpectedReward(statistics.fmean(scores), statistics.fmean(score == 1.0 for score in scores))

    def _post(self, path: str, content: dict[str, Any]) -> Any:
        answer = requests.post(f"{self.base_url}/{path}", json=content, timeout=600)
        answer.raise_for_status()
        return answer.json() if answer.content else None


@contextmanager
def started(task: GymTask, sizes: Sizes, learning_rate: float, folder: Path) -> Iterator[GymBench]:
    """A bench with a model that is trained on worked solutions, unless `folder` has it."""
    model_dir = folder / f"warm_start_{task.name}"
    if not (model_dir / "model.safetensors").exists():
        torch.manual_seed(0)
        tokenizer = build_tokenizer(TASKS.values())
        model = build_model(tokenizer)
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        warm_start(model, tokenizer, task, sizes.warm_start_steps, seed=0)
        torch.set_num_threads(threads)
        save(model, tokenizer, model_dir)
    vllm_args = ["--dtype", "float32", "--max-model-len", str(MAX_LENGTH), "--enforce-eager"]
    log_file = folder / f"server_{task.name}.log"
    with LocalServer(model_dir, vllm_args=vllm_args, log_file=log_file, quiet=True) as server:
        yield GymBench(task, sizes, learning_rate, model_dir, server.base_url)


def main() -> None:
    parser = training_parser(__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--april-steps", type=int, help="optimizer steps of the APRIL trainings (default: as many)")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    arguments = parser.parse_args()
    prepare()
    task = TASKS[arguments.task]
    steps = 2 if arguments.quick else arguments.steps
    warm_start_steps = 5 if arguments.quick else task.warm_start_steps
    sizes = Sizes(steps, arguments.april_steps or steps, every=5, warm_start_steps=warm_start_steps)
    folder = arguments.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    planned = schedule([task.name], 1 if arguments.quick else arguments.seeds, (SYNCHRONOUS, APRIL))
    path = folder / f"tasks_{task.name}.json"
    settings = {"sizes": asdict(sizes), "learning_rate": arguments.learning_rate}
    runs = measure(settings, planned, path, partial(started, task, sizes, arguments.learning_rate, folder))
    print(f"\n{tables(runs)}")


if __name__ == "__main__":
    main()
