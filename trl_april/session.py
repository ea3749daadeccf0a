"""The rollouts of one training run: rows, pool, engine, driver, and the event loop that rounds run in.

The invariant owned here: as many rows are handed out as training needs, whatever is rejected on the way; the training
thread touches the pool only while the loop stands still, since requests may run beside the training; and nothing of a
run outlives [`RolloutSession.close`] but its pool.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.logging import get_logger
from transformers.trainer_utils import SaveStrategy
from trl import GRPOConfig

from .admission import Admission, GroupElsewhere, NewGroup
from .auto.auto_factor import AutoFactor
from .auto.factor_chooser import START, FactorChooser
from .background import BackgroundLoop
from .checkpoint import SavedRollouts, save_rollouts
from .config import AprilOptions
from .dynamic_sampling import DynamicSampling
from .errors import RoundSuspended, ServerError
from .open_files import make_room
from .pool import Pool
from .pool_state import restore
from .processes import Processes
from .progress import NotebookBar, RoundProgress
from .quota import SharedQuota
from .recovery import Recovery
from .rollout import RolloutDriver
from .round import Round
from .row_order import make_source, optimiser_steps_per_round, resumed_source, row_columns
from .sampling import sampling_of
from .scoring import RewardScorer
from .stop import StopRequest
from .types import Group
from .vllm_engine import VLLMEngine


if TYPE_CHECKING:
    from .trainer import APRILGRPOTrainer

logger = get_logger(__name__)


class RolloutSession:
    """Delivers the batches of a training run, round by round.

    Args:
        trainer ([`APRILGRPOTrainer`]):
            Whose dataset, tokenizer, reward functions and server are used.
        options ([`AprilOptions`]):
            APRIL's own options.
        processes ([`OneProcess`] or [`ManyProcesses`]):
            Those that training runs in.
        stop (`StopRequest`):
            Whether a signal has asked training to end.
        api_key (`str`, *optional*):
            Key of the server.
        saved ([`~trl_april.checkpoint.SavedRollouts`], *optional*):
            What the checkpoint holds that training resumes from.
    """

    def __init__(
        self,
        trainer: APRILGRPOTrainer,
        options: AprilOptions,
        *,
        processes: Processes,
        stop: StopRequest,
        api_key: str | None = None,
        saved: SavedRollouts | None = None,
    ) -> None:
        args = trainer.args
        self._trainer = trainer
        self._processes = processes
        self.pool = make_pool(args, options)
        self.scorer = RewardScorer(trainer)
        elsewhere: list[Group] = []
        if saved is None:
            self._source = make_source(trainer)
        else:
            elsewhere = self._restore(saved)
        # Groups may be there beyond the target, of a checkpoint that was written under another one.
        groups_here = math.ceil(max(self.pool.target, len(self.pool.roster)) / processes.count)
        connections = make_room(groups_here * trainer.num_generations)
        will_save = args.save_strategy != SaveStrategy.NO or options.save_on_signal
        self._admission = Admission(trainer, self._source, processes, will_save=will_save)
        if saved is not None:
            self._admission.resume(self.pool, elsewhere, row_columns(trainer))
        self._in_training: deque[tuple[int, list[Group]]] = deque()  # the batches of this process, by first micro-step
        self._engine = VLLMEngine(
            trainer.vllm_generation.base_url,
            trainer.vllm_generation.facts.model,
            sampling_of(args, stop_token_ids=trainer.eos_token_ids),
            stream_interval=options.stream_interval,
            vocab_size=trainer.model.config.get_text_config().vocab_size,
            api_key=api_key,
        )
        self._dynamic = None
        if options.dynamic_sampling:
            self._dynamic = DynamicSampling(
                self.scorer.score,
                self.scorer.has_signal,
                self._replace,
                max_rejected=options.max_rejected_groups_per_round or 10 * self.pool.quota,
            )
        self._stop = stop
        self.recovery = Recovery(trainer.vllm_generation, processes, patience=args.vllm_server_timeout, stop=stop)
        self._tokens_at_outage = 0
        self.quota = processes.quota(self.pool.roster, self._dynamic.max_rejected if self._dynamic else None)
        self.driver = RolloutDriver(
            self.pool,
            self._engine,
            run_id=f"{self._draw_id():012x}",
            seed=sampling_of(args).seed,
            idle_timeout=args.vllm_server_timeout,
            dynamic_sampling=self._dynamic,
            quota=self.quota,
            overlap=options.overlap_generation,
            resume_kv=options.resume_kv,
        )
        self._overlap = options.overlap_generation
        self._keeps = options.resume_kv == "keep"
        self._loop = BackgroundLoop("trl-april-rollouts")
        self._notebook = NotebookBar.if_here()
        self._auto_factor = None
        if isinstance(options.over_provisioning, str):  # "auto"
            chooser = FactorChooser(
                self.pool,
                group_size=trainer.num_generations,
                max_completion_length=trainer.max_completion_length or trainer.vllm_generation.facts.max_model_len,
                reuses_kv=options.resume_kv != "recompute",
                overlaps=options.overlap_generation,
                max_sequences=trainer.vllm_generation.facts.max_sequences,
                max_groups=-processes.most([-(connections // trainer.num_generations) * processes.count])[0],
                total=processes.total,
                is_first=processes.rank == 0,
            )
            self._auto_factor = AutoFactor(chooser, self.pool)

    def run_round(self, version: int, *, silent: bool) -> Round:
        """Fill the pool, and run until the quota is met.

        Args:
            version (`int`):
                Policy version that the server has the weights of.
            silent (`bool`):
                Whether to show no progress bar.

        Raises:
            As [`RolloutDriver.run_round`], and `ConfigError` for a prompt that leaves no room for a completion. A
            `ServerError` comes after the server was waited for, and in all processes.
        """
        change = None if self._auto_factor is None else self._auto_factor.choose()
        if change is not None:
            logger.info(str(change))
        with self._loop.paused():
            if change is not None:
                self.pool.over_provisioning = change.after
            self._open_round(version)
        done = None
        while done is None:
            if self._generate(silent=silent):
                # In one standstill: what ends after the processes have agreed has ended in this one only.
                with self._loop.paused():
                    done = self._take() if self._may_close() else None
        self.recovery.all_is_well()
        batch, row_of = self.pool.roster.delivered, self._admission.row_of
        rejected = list(self.pool.roster.rejected)
        done.groups = self._processes.deal(done.groups, batch, row_of, self._trainer.num_generations)
        self._admission.let_go([*batch, *rejected])
        self._account_for_rejected()
        if self._overlap:
            self._go_on()
        if self._auto_factor is not None:
            self._auto_factor.predict()
        return done

    def _take(self) -> Round:
        """The round, with the groups that this process delivers."""
        done = self.driver.take()
        self._let_go_of_trained()
        self._in_training.append((self._trainer._step, done.groups))
        if self._auto_factor is not None:
            self._auto_factor.observe(done)
        return done

    def _open_round(self, version: int) -> None:
        """Enter the round and fill the pool."""
        self.pool.begin_round(version)
        if self._overlap:
            self._processes.agree(self.pool)  # what has finished since the last round closed
        if self.pool.max_parked_tokens is not None:  # each process has its own, but they admit together
            (full,) = self._processes.most([float(self.pool.is_full)])
            self.pool.roster.admits_surplus = not full
        for group in self._admission.next_groups(self.pool.room):
            group.admit_to(self.pool)
        self.driver.open_round()

    def _go_on(self) -> None:
        """Fill the pool for the next round, and let it be generated while this one is trained."""
        groups = self._admission.next_groups(self.pool.room_ahead)
        with self._loop.paused():
            for group in groups:
                group.admit_to(self.pool)
        self._loop.run(self.driver.go_on())

    def make_way(self) -> None:
        """End what runs beside the training, or hold it on a paused server, so that the weights can change. A
        collective call.

        With `resume_kv="keep"`, what runs goes on with the new weights when the server is resumed after the sync.
        """
        if self._auto_factor is not None:
            self._auto_factor.made_way()
        if not (self._keeps and self._pause()):
            self.cut()
            return
        self._loop.run(self.driver.hold(self._trainer.state.global_step), poll=self._processes.check)
        self._processes.barrier()

    def _pause(self) -> bool:
        """Let the server stand still, if anything runs on it and nothing more is sent; whether it does.

        Where it is full, what asks it behind the sync whether the weights are there would wait for a place, behind all
        that waits for one already: as long as completions take.
        """
        server = self._trainer.vllm_generation
        self._loop.run(self.driver.stop_asking())
        with self._loop.paused():  # requests begin and end meanwhile
            counts = [self.driver.in_flight, self.driver.unbegun]
        running, unbegun = self._processes.total(counts)
        waiting = server.requests_waiting() if running else 0
        if waiting is not None and waiting > unbegun:
            return False  # some have tokens and were preempted. They come first whatever is cut of the others
        if waiting or running >= (server.facts.max_sequences or 0):
            self._loop.run(self.driver.make_place(), poll=self._processes.check)
        (running,) = self._processes.total([self.driver.in_flight])  # none sends any more behind this
        return running > 0 and server.pause()

    def cut(self) -> None:
        """End what runs beside the training, in all processes, so that the weights can change. A collective call."""
        if self._overlap:
            self._loop.run(self.driver.cut(), poll=self._processes.check)
            self._processes.barrier()

    def _generate(self, *, silent: bool) -> bool:
        """Run the round on; whether it may be closed, or else an outage is over."""
        interrupted: ServerError | RoundSuspended | None = None
        with RoundProgress(self.pool, self.driver, self.quota, disable=silent, notebook=self._notebook) as progress:

            def poll() -> None:
                self._processes.check()
                progress.update()
                if self._stop.signal:
                    self._loop.call(lambda: self.driver.suspend("A signal has asked training to end."))

            try:
                self._loop.run(self.driver.generate(), poll=poll)
            except (ServerError, RoundSuspended) as error:
                interrupted = error
        if interrupted is None:
            return True
        if self.quota is not None:
            self._agree(self.quota)
        self._recover(interrupted)
        return False

    def _may_close(self) -> bool:
        """Agree on what is finished; whether that closes the round.

        One that is given up closes for its number of rejected groups, as far as it is counted while it runs. That
        groups which fall due are among those that have replaced them shows here, and then the round goes on.
        """
        if self.quota is not None:
            self._agree(self.quota)
        roster = self.pool.roster
        is_over = len(roster.finished) == len(roster)  # whatever that is: going on would not change it
        return self._dynamic is None or is_over or self._dynamic.may_close(self.pool)

    def _recover(self, interrupted: ServerError | RoundSuspended) -> None:
        """Get over what has suspended the round; every process comes here.

        Raises:
            ServerError: If the server stays away, or generates nothing.
            Stopped: If a signal has asked training to end.
        """
        began = time.monotonic()
        lost = isinstance(interrupted, ServerError)
        # Of any process: the others may have waited behind its requests.
        (progressed,) = self._processes.most([float(self.pool.ledger.tokens_generated > self._tokens_at_outage)])
        if not lost or progressed:
            self.recovery.all_is_well()
        self._tokens_at_outage = self.pool.ledger.tokens_generated
        self.recovery.wait_for_server(interrupted if lost else None)
        self.recovery.restore_weights()
        assert self.driver.round is not None
        self.driver.round.outages += 1
        self.driver.round.outage_seconds += time.monotonic() - began

    def _agree(self, quota: SharedQuota) -> None:
        """Let every process know what is finished in all of them, and so which groups the round delivers."""
        if self._dynamic is not None:
            quota.tell_rest()
            self._processes.barrier()
            quota.learn_rest()
            # When the round closed, some processes had admitted replacements that others had not heard of yet, and
            # perhaps rejected those, too.
            replaced = int(self._processes.most([self._dynamic.replaced])[0])
            while (missing := min(replaced - self._dynamic.replaced, self._dynamic.missing(self.pool))) > 0:
                self._dynamic.replaced += missing
                for group in self._replace(missing):
                    group.admit_to(self.pool)
                quota.learn_rest()
        self._processes.agree(self.pool)
        if self._processes.rank == 0:
            quota.end_round()  # no process looks at it any more

    def save(self, checkpoint: Path) -> None:
        """Write what training would have to resume with into a checkpoint. A collective call.

        That is the pool, and the batches of which not every use has gone into the weights: a generation batch that is
        trained for several optimiser steps is generated anew by TRL if training resumes in the middle of it.
        """
        processes = self._processes
        self._let_go_of_trained()
        with self._loop.paused():
            pool = self.pool.state_dict([group for _, groups in self._in_training for group in groups])
        save_rollouts(
            checkpoint,
            pool,
            self._source.state_dict(),
            save_id=f"{self._draw_id():012x}",
            rank=processes.rank,
            processes=processes.count,
            barrier=processes.barrier,
        )

    def _draw_id(self) -> int:
        """Chance, the same in all processes."""
        drawn = secrets.randbits(48) if self._processes.rank == 0 else 0
        return int(self._processes.total([drawn])[0])

    def close(self) -> None:
        """Close connections, threads and loop, and take the bar away."""
        with ExitStack() as rest:  # also if the first of it is interrupted
            rest.callback(self._loop.close)
            rest.callback(lambda: self._loop.run(self._engine.close()))
            if self._dynamic is not None:
                rest.callback(self._dynamic.close)
            if self._notebook is not None:
                rest.callback(self._notebook.remove)
            if self._auto_factor is not None:
                rest.callback(self._auto_factor.close)
            self._loop.run(self.driver.close())

    def _let_go_of_trained(self) -> None:
        args = self._trainer.args
        uses = args.steps_per_generation * args.num_iterations
        while self._in_training and self._in_training[0][0] + uses <= self._trainer.trained_micro_steps:
            self._in_training.popleft()

    # Resuming

    def _restore(self, saved: SavedRollouts) -> list[Group]:
        """Go on with what a checkpoint holds; returns the groups of other processes."""
        trainer, roster = self._trainer, self.pool.roster
        elsewhere = restore(
            self.pool,
            saved.pools,
            version=trainer.state.global_step,
            owns=self._processes.owns,
            has_totals=self._processes.rank == 0,
            num_reward_funcs=len(trainer.reward_funcs),
        )
        self._source, unused = resumed_source(
            trainer,
            saved.source,
            held=len(roster),
            rejected=sum(state["groups_rejected"] for state in saved.pools),
            next_id=roster.last_id + 1,
        )
        if unused > 0:
            logger.warning(
                f"The checkpoint holds {len(roster)} groups in flight, and what is left of the training can use "
                f"{len(roster) - unused} of them: it is shorter, or its batches are smaller, than when it was "
                "written. The youngest are not trained."
            )
        logger.info(f"Training resumes with {len(roster)} groups in flight.")
        return elsewhere

    # Rows

    def _replace(self, rejected: int) -> Sequence[NewGroup | GroupElsewhere]:
        """As many groups as were rejected. Called in the middle of a round, in another thread."""
        self._source.replace(rejected)
        return self._admission.next_groups(rejected)

    def _account_for_rejected(self) -> None:
        """Let the source hand out as many rows more as groups were rejected, so that training ends as planned."""
        if self._dynamic is None:
            return
        unreplaced = self.pool.num_rejected - self._dynamic.replaced
        if unreplaced > 0:
            self._source.replace(unreplaced)
        elif unreplaced < 0:
            # A round that had to be filled with rejected groups trains some that have been replaced. Near the end of
            # training the replacements are on their way already, and nothing can use them any more.
            self.cut()
            withdrawn = self.pool.withdraw(self._source.take_back(-unreplaced))
            self._admission.let_go(withdrawn)
            if withdrawn:
                logger.info(f"{len(withdrawn)} groups are not trained: training ends before it could use them.")


def make_pool(args: GRPOConfig, options: AprilOptions) -> Pool:
    """The pool that a training run with these arguments needs."""
    versions_per_round = optimiser_steps_per_round(args)
    is_auto = isinstance(options.over_provisioning, str)  # which keeps to the bound under every policy
    over_provisioning = START if isinstance(options.over_provisioning, str) else options.over_provisioning
    if options.max_staleness is not None and (is_auto or options.staleness_policy == "wait"):
        # A round of several optimiser steps ages what waits by as many versions.
        most = options.max_staleness // versions_per_round + 1
        if over_provisioning > most:
            # "auto" has no factor that would have to be lowered, but may be left without any to choose.
            if not is_auto or most == 1 < versions_per_round:
                what = "is 'auto' and stays" if is_auto else f"is lowered from {over_provisioning} to"
                logger.warning(
                    f"over_provisioning {what} {most}{', which is synchronous training' if most == 1 else ''}: a "
                    f"generation batch is trained for {versions_per_round} optimiser steps, so with "
                    f"max_staleness={options.max_staleness} a group can wait {most - 1} rounds. Set max_staleness to "
                    f"{math.ceil(over_provisioning - 1) * versions_per_round} or more for a factor of "
                    f"{over_provisioning:g}; None, or null in YAML, lifts the bound."
                )
            over_provisioning = most
    return Pool(
        args.generation_batch_size // args.num_generations,
        over_provisioning=over_provisioning,
        max_staleness=options.max_staleness,
        staleness_policy=options.staleness_policy,
        versions_per_round=versions_per_round,
        dynamic_sampling=options.dynamic_sampling,
        max_parked_tokens=options.max_parked_tokens,
    )
