"""The rollouts of a training run: wires rows, pool, engine, server, rounds, checkpoints and the run log.

Invariant: [`RolloutSession.close`] leaves only the pool of a run.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerState
from trl import GRPOConfig

from .agents.rollout_function import FILES_PER_SAMPLE, RolloutTurns
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
from .rollout.loop import RoundLoop, run_blocking
from .rollout.record import Round
from .rollout.training_steps import TrainingSteps
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
        )
        self.scorer, self._act, self._user_code = scorer, act, user_code
        # State that checkpoints store partly or not at all, so it must be rebuilt.
        self._restorable = act.environments if isinstance(act, ToolTurns) else act
        self.pool = self._new_pool()
        self._settings = {
            **run_options(args, options, self.pool),
            **{name: getattr(args, name) for name in SAMPLING},  # compared by a resume
            "dataset_rows": None if rows.is_stream else len(rows.dataset),
        }
        saved = checkpoints.take_rollouts()
        self._source, elsewhere = self._restore(saved, rows, checkpoints.resumed_from)
        # A checkpoint written under a higher target can hold more groups.
        groups_here = math.ceil(max(self.pool.schedule.target, len(self.pool.schedule)) / processes.count)
        files = FILES_PER_SAMPLE if isinstance(act, RolloutTurns) else 1
        connections = reserve_connections(groups_here * plan.num_generations, files)
        admission = Admission(plan, self._source, rows.read, tokenize, processes.owns)
        if processes.rank == 0:
            check_longest(budget, rows, tokenize, silent=args.disable_tqdm)
        if saved is not None:
            admission.resume(self.pool, elsewhere, rows.columns())
        self._engine = rollout_engine(options, sampling, server, plan.vocab_size, processes.rank)
        self._dynamic = None if scorer is None else self._new_dynamic_sampling(scorer, admission)
        quota = processes.quota(self.pool.schedule, self._dynamic.max_rejected if self._dynamic else None)
        self.recovery = Recovery(server, processes, stop, sync=self._sync, route=self._route)
        self._loop = BackgroundLoop("trl-april-rollouts")
        self.driver = self._new_driver(sampling, images_of, quota, idle_timeout=args.vllm_server_timeout)
        self._control = self._new_control(connections) if options.over_provisioning == "auto" else None
        self.steps = self._new_steps(admission, quota, stop, silent=args.disable_tqdm)
        self._rounds = RoundLoop(
            self.pool,
            self.driver,
            self.steps,
            quota=quota,
            dynamic=self._dynamic,
            overlap=options.overlap_generation,
            keeps=options.resume_kv == "keep",
        )
        if isinstance(act, ToolTurns) and act.environments is not None:
            self._report_instances()
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
        self.correction = BatchCorrection(processes, self.run_log.note, dppo_threshold=options.dppo_threshold)

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

    def _new_steps(
        self, admission: Admission, quota: SharedQuota | None, stop: StopRequest, *, silent: bool
    ) -> TrainingSteps:
        return TrainingSteps(
            self.driver,
            self._engine,
            self._server,
            self._source,
            admission,
            self._plan,
            loop=self._loop,
            processes=self._processes,
            quota=quota,
            recovery=self.recovery,
            stop=stop,
            calls=self._user_code.calls,
            control=self._control,
            silent=silent or self._processes.rank > 0,
        )

    def _new_dynamic_sampling(self, scorer: RewardScorer, admission: Admission) -> DynamicSampling:
        options = self._options
        return DynamicSampling(
            scorer.score,
            scorer.has_signal if options.dynamic_sampling else None,
            admission.replacements,
            max_rejected=options.max_rejected_groups_per_round or 10 * self.pool.schedule.quota,
            # During training, a reward model would need memory that training uses.
            between_rounds=not options.dynamic_sampling and not scorer.has_models,
            executor=self._user_code.threads("rewards", limit=1),
        )

    def _new_control(self, connections: int) -> AdmissionControl:
        """Return the control of `over_provisioning="auto"`, limited by the connections that each process may open."""
        processes = self._processes
        groups = connections // self._plan.num_generations * processes.count
        return AdmissionControl(
            self.pool,
            max_groups=-processes.reduce_max([-groups])[0],
            reduce_sum=processes.reduce_sum,
            is_first=processes.rank == 0,
        )

    def _report_instances(self) -> None:
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
        """Sync the weights, fill the pool, and run until the quota is met; see [`RoundLoop.run`].

        Returns the round, whose groups this process trains from `micro_step` on, and its `april/` metrics. With
        `is_synced`, weights are sent only if the server has lost them. `profiled` is TRL's profiling context.

        Raises:
            ServerError, Stopped, WeightSyncError: In all processes, if they occur in any.
        """
        self.run_log.round_began()
        step = self.steps.step = self._state.global_step
        self.steps.plan = self.steps.plan.until(self._state.max_steps, step)
        self.steps.micro_step = micro_step
        with profiled("sync_weights"), self.run_log.timing("sync"):
            if not is_synced:
                self.recovery.sync_weights()
            sync_seconds = self._server.sync_seconds if not is_synced or self.recovery.restore_weights() else 0.0
        with profiled("vLLM.generate"):
            done = run_blocking(self._rounds.run(step))
        metrics = round_metrics(
            done,
            self.pool,
            sync_seconds=sync_seconds,
            sync_mismatch=self._server.sync_mismatch,
            max_staleness=self._options.max_staleness,
            stream_interval=max(self._options.stream_interval, self._server.server_info.stream_interval),
            restored=self._restorable.take_restored() if self._restorable else (0, 0),
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

    @contextmanager
    def scoring_suspended(self) -> Iterator[None]:
        """Call no reward function in its thread in this context, in which an evaluation calls them."""
        if (dynamic := self._dynamic) is None:
            yield
            return
        self._loop.run(dynamic.suspend(), poll=self._processes.check, calls=self._user_code.calls)
        try:
            yield
        finally:
            dynamic.is_suspended = False

    def cut(self) -> None:
        """Abort the requests that run during training, in all processes. A collective call."""
        run_blocking(self._rounds.cut())

    def save(self, checkpoint: Path) -> None:
        """Write the rollouts into a checkpoint: the pool, and the batches that are not fully trained.

        If training resumes in the middle of a batch of several optimizer steps, TRL generates the batch again. A
        collective call.
        """
        with self._loop.paused():
            pool = state_dict(self.pool, [group for _, groups in self.steps.in_training for group in groups])
        rollouts = SavedRollouts([pool], self._source.state_dict(), self._settings)
        save_rollouts(checkpoint, rollouts, save_id=self._draw_id(), processes=self._processes)

    def close(self) -> None:
        """Close requests, connections, threads, the event loop and the progress bar."""
        with ExitStack() as rest:  # runs even if the first call is interrupted
            rest.callback(self._loop.close)
            rest.callback(lambda: self._loop.run(self._engine.close()))
            rest.callback(self.steps.close)
            for part in filter(None, (self._dynamic, self._act)):
                rest.callback(part.close)
            self._user_code.cancel()
            self._server.servers.give_up()
            self._loop.run(self.driver.close())

    def _sync(self) -> None:
        """Sync the weights, without a retry. A collective call."""
        run_blocking(self._rounds.sync(self._state.global_step))

    def _route(self) -> None:
        run_blocking(self.steps.route(self._state.global_step))

    def _restore(
        self, saved: SavedRollouts | None, rows: TrainingRows, checkpoint: str | None = None
    ) -> tuple[RowSource, list[Group]]:
        """Restore the pool from a checkpoint, if any; returns the row source, and the groups of other processes."""
        if saved is None:
            return make_source(rows, self._plan, self._state.global_step), []
        try:
            return self._restore_rollouts(saved, rows)
        except PoolError as error:
            raise CheckpointError(
                f"The partial samples in {checkpoint} cannot be resumed. {error} Resume from another checkpoint, or "
                f"remove the folder `{FOLDER}` there to continue without them."
            ) from error

    def _restore_rollouts(self, saved: SavedRollouts, rows: TrainingRows) -> tuple[RowSource, list[Group]]:
        step = self._state.global_step
        pools = saved.pools
        held = sum(len(state["groups"]) for state in pools)
        source, surplus = resumed_source(
            rows,
            self._plan,
            step,
            saved.source,
            held=held,
            rejected=sum(state["groups_rejected"] for state in pools),
            # Skip the ids of the batch in training, which is generated again.
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
            num_reward_funcs=0 if self.scorer is None else len(self.scorer.functions),
            restore_environments=self._restorable.restore if self._restorable else lambda groups: (),
        )
        logger.warning(account_of([*self.pool, *elsewhere], saved.settings, self._settings))
        return source, elsewhere

    def _draw_id(self) -> str:
        """A random id, the same in all processes."""
        return self._processes.decide(lambda: secrets.token_hex(6))
