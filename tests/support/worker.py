"""Trainings that a process of `launch.py` or `preloaded.py` runs, by name, one after the other.

Usage: `accelerate launch ... -m tests.support.worker SPEC.json`. SPEC has `model`, `url`, `folder` and `runs`; each
run has a `name`, a `kind` (a function of this file) and its options. Each process writes FOLDER/NAME-RANK.json.
"""

import faulthandler
import json
import os
import signal
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trl import GRPOConfig, GRPOTrainer

import trl_april.server.local
from tests.server.test_local import HEALTHY
from tests.support.proxy import Proxy
from tests.trainer import test_trainer
from tests.trainer.test_trainer import distinct_characters, rows_of
from trl_april import APRILGRPOConfig, APRILGRPOTrainer, LocalServer
from trl_april.bridge import construction
from trl_april.bridge.hand_over import rollout_output
from trl_april.engine.vllm import VLLMEngine


RANK, NUM_PROCESSES = 0, 1  # `main` sets them: what is imported may be forked afterwards
OPTIONS = {
    "num_generations": 4, "max_completion_length": 48, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
    "save_strategy": "no", "bf16": False, "use_cpu": True, "disable_tqdm": True, "log_level": "error",
    "gradient_checkpointing": False,
}  # fmt: skip


# transformers loads an optimizer to the device of its process, which accelerate calls cpu:0 or cpu:1 where there are
# several on a CPU. torch knows cpu alone, so that nobody can resume there.
torch.serialization.register_package(
    5, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


class RecordingTrainer(APRILGRPOTrainer):
    """Keeps what is trained in this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rounds: list[Any] = []
        super().__init__(*args, **kwargs)
        self.longest = self.args.max_completion_length

    def _april_run_round(self) -> Any:
        done = super()._april_run_round()
        self.rounds.append(done)
        return done


def limit_length(trainer: APRILGRPOTrainer, tokens: int) -> None:
    """Groups admitted from now on get `tokens` per sample. Users cannot change it during training."""
    if trainer._april_session is None:
        trainer.args.max_completion_length = trainer._april_fixed["trainer.args.max_completion_length"] = tokens
    else:
        trainer.pool.budget = replace(trainer.pool.budget, max_completion_length=tokens)


def make_trainer(
    spec: dict[str, Any], run: dict[str, Any], *, reward: Any = distinct_characters, trainer_class=RecordingTrainer
) -> RecordingTrainer:
    options = {"overlap_generation": False, "resume_kv": "recompute", "vllm_server_base_url": spec["url"]}
    options |= {"over_provisioning": 2.0, "max_staleness": 5}
    options |= OPTIONS | run.get("options", {})
    batch = run.get("batch", 16) // NUM_PROCESSES // options.get("steps_per_generation", 1)
    options.setdefault("per_device_train_batch_size", batch)
    peft_config = None
    if run.get("lora"):
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    args = APRILGRPOConfig(str(Path(spec["folder"]) / f"{run['name']}-out"), **options)
    if run.get("fsdp"):
        # accelerate does FSDP only for what it takes for GPUs, and otherwise DDP without a word. The devices and the
        # backend (gloo) have been chosen by now and stay as they are.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return trainer_class(
        model=run.get("model", spec["model"]),
        reward_funcs=reward,
        args=args,
        train_dataset=rows_of(run.get("rows", 24)),
        eval_dataset=rows_of(8) if options.get("eval_strategy") else None,
        peft_config=peft_config,
    )


def outcome(trainer: RecordingTrainer) -> dict[str, Any]:
    return {
        "rounds": [
            [
                {
                    "id": group.group_id,
                    "number": group.row["number"],
                    "samples": [sample.index for sample in group.samples],
                    "tokens": [sample.token_ids.tolist() for sample in group.samples],
                    "versions": [sorted({*sample.versions} - {None}) for sample in group.samples],
                    "resumed": [len(sample.segments) - 1 for sample in group.samples],
                }
                for group in done.groups
            ]
            for done in trainer.rounds
        ],
        "carried_here": [done.carried_tokens for done in trainer.rounds],
        "generated_here": [done.generated_tokens for done in trainer.rounds],
        "log": trainer.state.log_history,
        "completions": completions_of(trainer),
        "left": len(trainer.pool),
        "server": trainer._april_server.pid if trainer._april_server is not None else None,
        "taken": trainer.pool.counters.groups_taken,
    }


def completions_of(trainer: RecordingTrainer) -> list[list[tuple[str, int]]]:
    """Versions of segments in TRL's table of completions, step by step."""
    files = sorted(Path(trainer.args.output_dir).glob("completions/*.parquet")) if RANK == 0 else []
    tables = [pandas.read_parquet(file) for file in files]
    return [list(table["versions"]) for table in tables]


# Kinds of runs


def train(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    trainer = make_trainer(spec, run)
    trainer.train(resume_from_checkpoint=run.get("resume"))
    return outcome(trainer)


def train_until_told(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Leaves a file when requests run in the second step, and lets nothing through from there if that is wanted.

    Completions are as long as they may be in that step only.
    """
    proxy = Proxy(spec["url"])

    class MarkingTrainer(RecordingTrainer):
        def _april_run_round(self):
            limit_length(self, self.longest if self.state.global_step == 1 else 8)
            if self.state.global_step == 1:
                threading.Thread(target=self.mark, daemon=True).start()
            return super()._april_run_round()

        def _all_have_begun(self) -> bool:
            return all(len(sample) > 0 for group in self.pool for sample in group.samples)

        def mark(self) -> None:
            while not self._april_session.driver.in_flight or not run["freeze"] and not self._all_have_begun():
                time.sleep(0.01)
            time.sleep(0.3)
            if run["freeze"]:
                proxy.freeze()
            (Path(spec["folder"]) / "running").touch()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = make_trainer({**spec, "url": proxy.url}, run, trainer_class=MarkingTrainer)
    trainer.train()
    return outcome(trainer)


def train_until_a_signal(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Process 1 gets a signal, in the middle of a round or while it trains.

    Completions are as long as they may be in the round that a signal comes in only.
    """

    class SignalledTrainer(RecordingTrainer):
        def _april_run_round(self):
            is_long = run["when"] == "round" and self.state.global_step == 2
            limit_length(self, self.longest if is_long else 40)
            gets_it = RANK == 1 and self.state.global_step == 2
            if gets_it and run["when"] == "round":
                before = self.pool.counters.tokens_generated
                threading.Thread(target=self.wait_for_tokens, args=[before], daemon=True).start()
            done = super()._april_run_round()
            if gets_it and run["when"] != "round":
                os.kill(os.getpid(), run["signal"])
            return done

        def wait_for_tokens(self, before: int) -> None:
            while self.pool.counters.tokens_generated == before:
                time.sleep(0.01)
            os.kill(os.getpid(), run["signal"])

    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = make_trainer(spec, run, trainer_class=SignalledTrainer)
    try:
        trainer.train()
        raised = None
    except (KeyboardInterrupt, SystemExit) as error:
        raised = [type(error).__name__, getattr(error, "code", None)]
    return {**outcome(trainer), "raised": raised, "step": trainer.state.global_step}


def train_and_replay(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Train, then let TRL's own trainer do the same with the same completions."""
    trainer, passes = make_trainer(spec, run), []
    # The canary and the check of blocks take passes without gradients.
    trainer.model.register_forward_pre_hook(lambda *call: passes.append(torch.is_grad_enabled()))
    trainer.train()
    rounds = iter(trainer.rounds)

    def replay(prompts: list[str], stock: GRPOTrainer) -> dict[str, Any]:
        groups = next(rounds).groups
        assert prompts == [group.row["prompt"] for group in groups for _ in group.samples]
        return rollout_output(groups)

    options = {**OPTIONS, **run.get("options", {})}
    options["per_device_train_batch_size"] = trainer.args.per_device_train_batch_size
    for name in ("over_provisioning", "generation_kwargs"):
        options.pop(name, None)
    stock = GRPOTrainer(
        model=spec["model"],
        reward_funcs=distinct_characters,
        args=GRPOConfig(str(Path(spec["folder"]) / "stock-out"), **options),
        train_dataset=rows_of(run.get("rows", 24)),
        rollout_func=replay,
    )
    stock.train()
    return {**outcome(trainer), "stock_log": stock.state.log_history, "training_passes": sum(passes)}


def train_sharded(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Train, and look in the middle of it at how the model is spread over the processes."""
    seen: dict[str, Any] = {}

    class LookingTrainer(RecordingTrainer):
        def _april_run_round(self):
            done = super()._april_run_round()
            if self.state.global_step == 1:
                seen.update(spread_of(self))
            return done

    trainer = make_trainer(spec, run, trainer_class=LookingTrainer)
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()  # outside of training, and with weights that the server does not have yet
    return {**outcome(trainer), **seen}


def spread_of(trainer: RecordingTrainer) -> dict[str, Any]:
    params = list(trainer.model.parameters())
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in params)
    if trainer.is_deepspeed_enabled:
        stage = trainer.model_wrapped.zero_optimization_stage()
        local = sum(p.ds_tensor.numel() if stage == 3 else p.numel() for p in params)
        # Stage 3 steps through the shards of the parameters; the optimizer's own list is empty in between.
        stepped = [p.ds_tensor for p in params if p.requires_grad] if stage == 3 else None
        stepped = stepped or trainer.model_wrapped.optimizer.optimizer.param_groups[0]["params"]
        optimizer = sum(p.numel() for p in stepped)
        return {"kind": f"zero{stage}", "whole": whole, "local": local, "optimizer": optimizer}
    kinds = {type(p).__name__ for p in params}
    dtensors = [p for p in params if isinstance(p, DTensor)]
    states = [v for state in trainer.optimizer.optimizer.state.values() for v in state.values()]
    return {
        "kind": "fsdp2" if isinstance(trainer.model, FSDPModule) else "+".join(sorted(kinds)),
        "world": dist.get_world_size(),
        "whole": whole,
        "local": sum(p.to_local().numel() for p in dtensors) + whole - sum(p.numel() for p in dtensors),
        "optimizer": sum(isinstance(v, DTensor) for v in states),
    }


def train_dynamically(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Train under dynamic sampling, where groups of rows with `number % every` other than 0 have equal rewards."""
    scored: list[list[int]] = []

    def reward(completions, number, log_extra, log_metric, **kwargs):
        scored.append(number)
        log_extra("row", number)
        log_metric("calls", 1.0)
        return [float(i % 4) if n % run["every"] == 0 else 1.0 for i, n in enumerate(number)]

    trainer = make_trainer(spec, run, reward=reward)
    trainer.train(resume_from_checkpoint=run.get("resume"))
    pool = trainer.pool
    return {
        **outcome(trainer),
        "scored": scored,
        "rejected": pool.counters.groups_rejected,
        "admitted": pool.counters.groups_admitted,
        "tokens": [pool.counters.tokens_generated, pool.counters.tokens_taken, pool.counters.tokens_rejected],
        "filled": [done.filled_groups for done in trainer.rounds],
        "logged_rows": list(trainer._logs["extra"]["row"]),
        "logged_rewards": list(trainer._logs["rewards"]["reward"]),
    }


def train_and_fail(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Train, with something that goes wrong in process 1, in the way that `run["how"]` says."""
    rank, how = RANK, run["how"]
    marker = Path(spec["folder"]) / f"{run['name']}-when"
    proxy = None
    if how == "server" and rank == 1:
        proxy = Proxy(spec["url"])  # on the way of this process, whose address is that of process 0
        construction.VLLMEngine = lambda address, *args, **kwargs: VLLMEngine(proxy.url, *args, **kwargs)

    def fail_now() -> None:
        marker.write_text(str(time.time()))
        if how == "server":
            proxy.break_off()
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise ValueError("this reward function does not work")

    def reward(completions, **kwargs):
        if rank == 1 and how == "reward" and kwargs["trainer_state"].global_step == 2:
            fail_now()
        return distinct_characters(completions)

    class FailingTrainer(RecordingTrainer):
        def _april_run_round(self):
            for server in self.vllm_generation.servers if proxy else ():
                server.control.base_url = proxy.url
            if rank == 1 and how != "reward" and self.state.global_step == 2:
                # In the middle of the round: it takes longer than this.
                threading.Timer(0.3, fail_now).start()
            return super()._april_run_round()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = make_trainer(spec, run, reward=reward, trainer_class=FailingTrainer)
    # A process that owns a server has to stop it, whichever process has failed. A web server is enough for that.
    trl_april.server.local.server_command = lambda model, host, port, *args, **kwargs: [
        *(sys.executable, "-c", textwrap.dedent(HEALTHY), str(port)),
    ]
    with LocalServer("any", quiet=True) if rank == 0 else nullcontext() as owned:
        if owned is not None:
            (Path(spec["folder"]) / f"{run['name']}-owned").write_text(owned.base_url)
        trainer.train()
    return outcome(trainer)


def trainer_with_tools(spec: dict[str, Any], options: dict[str, Any], **arguments: Any) -> RecordingTrainer:
    """On a fake server, whose weights are those of the first step."""
    from tests.support import tool_calling

    fixed = {"max_steps": 3, "learning_rate": 0.0, "max_completion_length": 500}
    args = APRILGRPOConfig(spec["folder"], vllm_server_base_url=spec["url"], **{**OPTIONS, **fixed, **options})
    return RecordingTrainer(
        reward_funcs=lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids],
        **{"args": args, **tool_calling.trainer_arguments(), **arguments},
    )


def evaluate_with_tools(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Each process evaluates other questions, whose samples have different numbers of turns."""
    from tests.support import tool_calling

    sizes = {"per_device_train_batch_size": 4, "num_generations": 8, "max_tool_calling_iterations": 2}
    sizes |= {"per_device_eval_batch_size": 8, "num_generations_eval": 2}
    trainer = trainer_with_tools(spec, sizes, eval_dataset=tool_calling.DATASET.select(range(8)))
    return {"reward": trainer.evaluate()["eval_reward"], "lost": not trainer.vllm_generation.servers.first.takes_part}


def train_with_environments(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Each process trains a part of each group, whose rewards only the process that generated it can compute."""
    from tests.support.environments import Counting

    trainer = trainer_with_tools(
        spec, {"per_device_train_batch_size": 4, "num_generations": 8, "max_tool_calling_iterations": 3},
        tools=[], environment_factory=Counting,
    )  # fmt: skip
    trainer.train()
    return {
        "samples": [
            [group.group_id, sample.index, sample.token_ids.tolist(), len(sample.conversation.messages)]
            + group.score.rewards[place]
            for done in trainer.rounds
            for group in done.groups
            for place, sample in enumerate(group.samples)
        ],
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
    }


def train_in_turns_and_compare(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """With a rollout function, on a real server. Compares every token."""
    from tests.trainer import test_tools_on_server

    server, folder = SimpleNamespace(base_url=spec["url"]), Path(spec["folder"]) / "out"
    trainer = test_tools_on_server.trainer_in_turns(server, spec["model"], folder, per_device_train_batch_size=8)
    trainer.train()
    compared, turns = test_trainer.check_logprobs(trainer), test_tools_on_server.check_turns(trainer)
    return {**outcome(trainer), "compared": compared, "turns": turns}


def train_with_an_environment_that_hangs(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """If `hangs`, calls after the first of a sample never return in the second round, which a file says."""
    from tests.support import environments

    class Hanging(environments.Saved):
        def count(self, by: int) -> int:
            """Counts up.

            Args:
                by: How far.
            """
            if run["hangs"] and self.counter and trainer.state.global_step == 1:
                (Path(spec["folder"]) / "hangs").touch()
                threading.Event().wait()
            return super().count(by)

    options = {
        "per_device_train_batch_size": 2, "num_generations": 2, "over_provisioning": 1.0, "save_strategy": "steps",
        "save_steps": 100, "log_level": "warning",
    }  # fmt: skip
    trainer = trainer_with_tools(spec, options, tools=[], environment_factory=Hanging)
    trainer.train(resume_from_checkpoint=not run["hangs"])
    return {
        "rewards": [group.score.rewards for done in trainer.rounds for group in done.groups],
        "token_ids": [[x.token_ids.tolist() for x in done.groups[0].samples] for done in trainer.rounds],
        "counted": environments.LOG,
        "restarted": [entry["april/restarted_samples"] for entry in trainer.state.log_history if "loss" in entry],
    }


def train_randomly(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    from tests.support import random_trainings

    random_trainings.quiet()
    case, make = random_trainings.draw(run["seed"], NUM_PROCESSES), random_trainings.april(spec["url"])
    trained, left = random_trainings.trained_rows(case, Path(spec["folder"]) / run["name"], make)
    return {"trained": trained, "left": left}


def main() -> None:
    global RANK, NUM_PROCESSES
    RANK, NUM_PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    if "patience" in spec:  # a process that hangs says where
        faulthandler.dump_traceback_later(spec["patience"])
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed.ops

        # Otherwise DeepSpeed compiles kernels for collective calls between CPUs, which takes a minute.
        deepspeed.ops.__compatible_ops__ = {}
    for run in spec["runs"]:
        sys.stderr.write(f"Process {RANK} runs {run}\n")
        path = Path(spec["folder"]) / f"{run['name']}-{RANK}.json"
        try:
            result = globals()[run["kind"]](spec, run)
        except BaseException as error:
            failed = {"error": type(error).__name__, "message": str(error), "when": time.time()}
            path.write_text(json.dumps({**failed, "cause": str(error.__cause__)}))
            raise
        path.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()  # gloo's threads may crash if this happens at the end of the interpreter


if __name__ == "__main__":
    main()
