"""The rollouts of one training run: wires rows, pool, engine, server, rounds, checkpoints and the run log.

Invariant: [`RolloutSession.close`] leaves nothing of a run behind but its pool.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import SaveStrategy
from trl import GRPOConfig

from .agents.rollout_function import RolloutTurns
from .agents.tools import ToolTurns
from .bridge.construction import rollout_engine
from .checkpoint.resume import RunCheckpoints, account_of
from .checkpoint.rollouts import FOLDER, SavedRollouts, save_rollouts
from .config import AprilOptions
from .data.admission import Admission, check_longest
from .data.order import TrainingRows, make_source, resumed_source
from .data.plan import TrainingPlan
from .data.source import Row, RowSource
from .distributed.processes import Processes, get_logger
from .distributed.quota import SharedQuota
from .distributed.signals import StopRequest
from .engine.protocol import ImagesOf
from .engine.sampling import SAMPLING, SamplingOptions
from .errors import CheckpointError, PoolError
from .pool.budget import Budget
from .pool.pool import Pool
from .pool.samples import Group
from .pool.state import restore, state_dict
from .rollout.driver import RolloutDriver
from .rollout.dynamic_sampling import DynamicSampling
from .rollout.event_loop import BackgroundLoop
from .rollout.round import Round
from .rollout.rounds import Rounds
from .rollout.user_code import UserCode
from .server.host import reserve_connections
from .training.batch import round_metrics, server_metrics
from .training.correction import BatchCorrection
from .training.rewards import RewardScorer
from .training.run_log import RunLog, run_options
from .tuning.admission_control import AdmissionControl
from .weights.recovery import Recovery
from .weights.sync import ServerGeneration


logger = get_logger(__name__)


class RolloutSession:
    """Delivers the batches of a training run, round by round.

    Raises:
        CheckpointError: If the rollouts of the checkpoint cannot be resumed.
    """

    def __init__(
        self,
        args: GRPOConfig,
        options: AprilOptions,
        *,
        rows: TrainingRows,
        tokenize: Callable[[list[Row]], list[list[int]]],
        images_of: ImagesOf,
        vocab_size: int,
        budget: Budget,
        sampling: SamplingOptions,
        server: ServerGeneration,
        num_reward_funcs: int,
        scorer: RewardScorer | None,
        act: ToolTurns | RolloutTurns | None,
        user_code: UserCode,
        state: TrainerState,
        processes: Processes,
        stop: StopRequest,
        checkpoints: RunCheckpoints,
    ) -> None:
        self._options, self._server, self._processes, self._state = options, server, processes, state
        self._plan = plan = TrainingPlan.of(
            args,
            max_steps=state.max_steps,
            budget=budget,
            epochs=state.num_train_epochs,
            vocab_size=vocab_size,
            saves_checkpoints=args.save_strategy != SaveStrategy.NO or options.save_on_signal,
        )
        self.scorer, self._act, self._user_code = scorer, act, user_code
        # What a checkpoint does not hold, or not whole, and must be brought back.
        self._restorable = act.environments if isinstance(act, ToolTurns) else act
        self._silent = args.disable_tqdm or processes.rank > 0
        self._in_training: deque[tuple[int, list[Group]]] = deque()  # batches of this process, by first micro-step
        self.pool = self._new_pool()
        self._settings = {
            **run_options(args, options, self.pool),
            **{name: getattr(args, name) for name in SAMPLING},  # which a resume compares
            "dataset_rows": None if rows.is_stream else len(rows.dataset),
        }
        saved = checkpoints.take_rollouts()
        try:
            self._source, elsewhere = self._restore(saved, rows, num_reward_funcs)
        except PoolError as error:
            raise CheckpointError(
                f"The partial samples in {checkpoints.resumed_from} cannot be resumed. {error} Resume from another "
                f"checkpoint, or remove the folder `{FOLDER}` from this one to continue without them."
            ) from error
        # A checkpoint written under a higher target can hold more groups than this one.
        groups_here = math.ceil(max(self.pool.schedule.target, len(self.pool.schedule)) / processes.count)
        connections = reserve_connections(groups_here * plan.num_generations)
        admission = Admission(plan, self._source, rows.read, tokenize, processes.owns)
        if processes.rank == 0:
            check_longest(budget, rows, tokenize, silent=self._silent)
        if saved is not None:
            admission.resume(self.pool, elsewhere, rows.columns())
        self._engine = rollout_engine(options, sampling, server, plan.vocab_size, processes.rank)
        self._dynamic = None if scorer is None else self._new_dynamic_sampling(scorer, admission)
        quota = processes.quota(self.pool.schedule, self._dynamic.max_rejected if self._dynamic else None)
        self._recovery = Recovery(server, processes, stop)
        self._loop = BackgroundLoop("trl-april-rollouts")
        self.driver = self._new_driver(sampling, images_of, quota, idle_timeout=args.vllm_server_timeout)
        self._rounds = self._new_rounds(admission, quota, stop)
        self._control = self._new_control(connections) if options.over_provisioning == "auto" else None
        if isinstance(act, ToolTurns) and act.environments is not None:
            self._say_instances()
        self.run_log = RunLog(
            Path(args.output_dir) if processes.rank == 0 else None,
            {
                **run_options(args, options, self.pool),
                "max_sequences": server.server_info.max_sequences,
                "weight_sync": server.weight_sync,  # the choice of "auto"
            },
            resumed_at_step=state.global_step if checkpoints.resumed_from else None,
            reduce_sum=processes.reduce_sum,
            processes=processes.count,
        )
        self.correction = BatchCorrection(processes, self.run_log.note)
        server.before_sync, server.servers.on_holding = self._quiesce, self._route

    def _new_pool(self) -> Pool:
        plan, options = self._plan, self._options
        return Pool(
            plan.groups_per_round,
            over_provisioning=options.bounded_factor(plan.versions_per_round),
            max_staleness=options.max_staleness,
            staleness_policy=options.staleness_policy,
            versions_per_round=plan.versions_per_round,
            dynamic_sampling=options.scores_groups,
            has_tools=self._act is not None,
            has_environments=self._restorable is not None,
            max_parked_tokens=options.max_parked_tokens,
            budget=plan.budget,
        )

    def _new_driver(
        self, sampling: SamplingOptions, images_of: ImagesOf, quota: SharedQuota | None, *, idle_timeout: float
    ) -> RolloutDriver:
        options, act = self._options, self._act
        return RolloutDriver(
            self.pool,
            self._engine,
            run_id=self._draw_id(),
            seed=sampling.seed,
            idle_timeout=idle_timeout,
            dynamic_sampling=self._dynamic,
            quota=quota,
            overlap=options.overlap_generation,
            resume_kv=options.resume_kv,
            server_of=self._engine.server_of,
            images_of=images_of,
            act=act,
            threads=None if act is None else act.threads,
        )

    def _new_rounds(self, admission: Admission, quota: SharedQuota | None, stop: StopRequest) -> Rounds:
        return Rounds(
            self.pool,
            self.driver,
            self._source,
            admission,
            num_generations=self._plan.num_generations,
            loop=self._loop,
            processes=self._processes,
            quota=quota,
            dynamic=self._dynamic,
            recovery=self._recovery,
            stop=stop,
            keeps_requests=self._options.resume_kv == "keep",
            overlap=self._options.overlap_generation,
            calls=self._user_code.calls,
        )

    def _new_dynamic_sampling(self, scorer: RewardScorer, admission: Admission) -> DynamicSampling:
        options = self._options
        return DynamicSampling(
            scorer.score,
            scorer.has_signal if options.dynamic_sampling else None,
            admission.replacements,
            max_rejected=options.max_rejected_groups_per_round or 10 * self.pool.schedule.quota,
            # Beside training, a reward model would need memory that training uses.
            between_rounds=not options.dynamic_sampling and not scorer.has_models,
            executor=self._user_code.threads("rewards", limit=1),
        )

    def _new_control(self, connections: int) -> AdmissionControl:
        """Admission for `over_provisioning="auto"`, within the connections that each process may open."""
        processes = self._processes
        groups = connections // self._plan.num_generations * processes.count
        return AdmissionControl(
            self.pool,
            max_groups=-processes.reduce_max([-groups])[0],
            reduce_sum=processes.reduce_sum,
            is_first=processes.rank == 0,
        )

    def _say_instances(self) -> None:
        schedule, highest = self.pool.schedule, self._control.highest if self._control else 0
        groups, size = (
            max(schedule.target, math.ceil(highest * schedule.quota), len(schedule)),
            self._plan.num_generations,
        )
        logger.warning(
            f"Environments: up to {groups * size} instances in all processes together, for {groups} groups of {size} "
            "samples in flight."
        )

    def run_round(
        self,
        micro_step: int,
        *,
        is_synced: bool,
        profiled: Callable[[str], AbstractContextManager[Any]],
    ) -> tuple[Round, dict[str, float]]:
        """Sync the weights, fill the pool, and run until the quota is met; see [`Rounds.run`].

        Returns the round, with the groups that this process trains first at `micro_step`, and its `april/` metrics.
        Weights that are synced are sent again if the server has lost them. `profiled` is TRL's profiling context.

        Raises:
            ServerError, Stopped, WeightSyncError: As [`Recovery.sync_weights`] and [`Rounds.run`], in all processes.
        """
        self.run_log.round_began()
        self._plan = self._plan.until(self._state.max_steps, self._state.global_step)
        with self._loop.paused():
            self._source.follow(self._plan.max_steps)
            self.pool.schedule.surplus_share = self._plan.surplus_share(self._state.global_step)
        with profiled("sync_weights"), self.run_log.timing("sync"):
            if not is_synced:
                self._recovery.sync_weights()
            sync_seconds = self._server.sync_seconds if not is_synced or self._recovery.restore_weights() else 0.0
        if self._control is not None:
            with self._loop.paused():
                change = self._control.choose()
            if change is not None:
                logger.info(str(change))

        def on_taken(done: Round) -> None:
            self._in_training.append((micro_step, done.groups))
            for group in done.groups:
                for one in (group, *group.samples):
                    one.images.clear()  # in the form of the engine they are large, and rows and messages have them
            if self._control is not None:
                self._control.observe(done, self._server.servers.loads() if self._processes.rank == 0 else ())

        with profiled("vLLM.generate"):
            done = self._rounds.run(self._state.global_step, silent=self._silent, on_taken=on_taken)
        metrics = round_metrics(
            done,
            self.pool,
            sync_seconds=sync_seconds,
            sync_mismatch=self._server.sync_mismatch,
            max_staleness=self._options.max_staleness,
            stream_interval=max(self._options.stream_interval, self._server.server_info.stream_interval),
            restarted_samples=self._restorable.take_restarted() if self._restorable else 0,
            reduce_sum=self._processes.reduce_sum,
            reduce_max=self._processes.reduce_max,
        )
        metrics |= server_metrics(
            *self._loop.run(self._engine.take_traffic()),
            lost=self._engine.num_lost,
            reduce_sum=self._processes.reduce_sum,
            reduce_max=self._processes.reduce_max,
        )
        self.run_log.note(metrics)
        return done, metrics

    def release_trained(self, micro_steps: int) -> None:
        """Release the batches whose last use is in the weights, after so many calls of `training_step`."""
        while self._in_training and self._in_training[0][0] + self._plan.micro_steps_per_round <= micro_steps:
            self._in_training.popleft()

    def cut(self) -> None:
        """Abort the requests beside training, in all processes. A collective call."""
        self._rounds.cut()

    def save(self, checkpoint: Path) -> None:
        """Write the rollouts into a checkpoint: the pool, and the batches that are not fully trained.

        TRL generates a batch that lasts for several optimiser steps anew if training resumes in the middle of it. A
        collective call.
        """
        with self._loop.paused():
            pool = state_dict(self.pool, [group for _, groups in self._in_training for group in groups])
        save_rollouts(
            checkpoint,
            pool,
            self._source.state_dict(),
            settings=self._settings,
            save_id=self._draw_id(),
            rank=self._processes.rank,
            processes=self._processes.count,
            barrier=self._processes.barrier,
        )

    def close(self) -> None:
        """Close requests, connections, threads, the event loop and the progress bar."""
        with ExitStack() as rest:  # also if the first call is interrupted
            rest.callback(self._loop.close)
            rest.callback(lambda: self._loop.run(self._engine.close()))
            rest.callback(self._rounds.close)
            for part in filter(None, (self._dynamic, self._act)):
                rest.callback(part.close)
            self._user_code.cancel()
            self._server.before_sync = self._server.servers.on_holding = None
            self._server.servers.give_up()
            self._loop.run(self.driver.close())

    def _quiesce(self) -> None:
        """Stop or hold the requests beside training, before new weights are loaded. A collective call."""
        self._rounds.quiesce(self._state.global_step, self._server.servers, self._server.oldest_kept)

    def _route(self) -> None:
        """Send requests to the servers that hold the weights."""
        servers = self._server.servers
        self._loop.run(
            self._engine.route_to(servers.addresses, servers.holding, self._state.global_step, servers.causes)
        )

    def _restore(
        self, saved: SavedRollouts | None, rows: TrainingRows, num_reward_funcs: int
    ) -> tuple[RowSource, list[Group]]:
        """Restore the pool from a checkpoint, if any; returns the row source, and the groups of other processes."""
        step = self._state.global_step
        if saved is None:
            return make_source(rows, self._plan, step), []
        pools = saved.pools
        held = sum(len(state["groups"]) for state in pools)
        source, surplus = resumed_source(
            rows,
            self._plan,
            step,
            saved.source,
            held=held,
            rejected=sum(state["groups_rejected"] for state in pools),
            # After those of a batch in training that is generated anew.
            next_id=max(state["last_id"] for state in pools) + 1 + sum(len(state["in_training"]) for state in pools),
        )
        if surplus > 0:
            logger.warning(
                f"The checkpoint holds {held} groups in flight, but the rest of training can use only "
                f"{held - surplus}: it resumes inside of a batch, is shorter, or has smaller batches. The youngest "
                "groups are dropped."
            )
        elsewhere = restore(
            self.pool,
            pools,
            read_row=rows.read,
            version=step,
            owns=self._processes.owns,
            has_totals=self._processes.rank == 0,
            surplus=surplus,
            num_reward_funcs=num_reward_funcs,
            restore_environments=self._restorable.restore if self._restorable else lambda groups: (),
        )
        logger.warning(account_of([*self.pool, *elsewhere], saved.settings, self._settings))
        return source, elsewhere

    def _draw_id(self) -> str:
        """A random id, the same in all processes."""
        return self._processes.decide(lambda: secrets.token_hex(6))
