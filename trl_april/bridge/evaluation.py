"""Evaluations, run by the driver of training.

In TRL's own loop, each turn waits for the slowest sample of all processes, and hangs if a process has no samples left.
Invariant: a sample has the turns that it would have in training, and waits for no other sample.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from trl import GRPOConfig, GRPOTrainer

from ..agents.rollout_function import FILES_PER_SAMPLE, RolloutTurns
from ..agents.tools import ToolTurns
from ..data.admission import NewGroup, check_prompt, prompt_name
from ..data.source import Row, copy_row
from ..distributed.processes import Processes
from ..engine.protocol import ImagesOf
from ..engine.sampling import SamplingOptions
from ..engine.servers import ServersEngine
from ..errors import RoundSuspended, ServerError
from ..pool.budget import Budget
from ..pool.pool import Pool
from ..pool.samples import Group
from ..rollout.driver import RolloutDriver
from ..rollout.event_loop import BackgroundLoop
from ..rollout.loop import RoundLoop, RoundSteps, run_blocking
from ..rollout.record import Round
from ..rollout.user_code import carrying
from ..server.host import reserve_connections
from ..training.batch import batch_rows
from ..weights.recovery import Recovery
from ..weights.servers import SyncedServers
from .construction import rollout_engine
from .hand_over import HandOver, replaced
from .rows import budget_of, sample_images, sampling, tokenize_prompts
from .tool_loop import tool_turns


class Evaluation:
    """Generates the completions of an evaluation, a sample for each row that TRL asks for.

    `act`, if any, is called after each turn of the model. `tokenize` returns the prompt ids of dataset rows,
    `images_of` the images that a sample has seen. `version` is the policy version to evaluate. After
    [`Evaluation.close`], only idle environments are left.
    """

    def __init__(
        self,
        args: GRPOConfig,
        act: ToolTurns | RolloutTurns | None,
        engine: ServersEngine,
        sampling: SamplingOptions,
        *,
        budget: Budget,
        tokenize: Callable[[list[Row]], list[list[int]]],
        images_of: ImagesOf,
        servers: SyncedServers,
        processes: Processes,
        version: int,
    ) -> None:
        self._args, self._act, self._engine, self._sampling = args, act, engine, sampling
        self._budget, self._tokenize, self._images_of = budget, tokenize, images_of
        self._servers, self._processes, self._version = servers, processes, version
        self._environments = act.environments if isinstance(act, ToolTurns) else None
        self._run_id = secrets.token_hex(6)
        self._next_id = 0
        self._groups: list[Group] = []  # the last batch, whose environments are still in use
        self._loop = BackgroundLoop("trl-april-evaluation")

    def generate(self, rows: list[Row], recovery: Recovery) -> HandOver:
        """Generate a completion for each row. A collective call; after an outage, samples continue where they stopped.

        Observations of environments and columns of rollout functions are added to the rows.
        """
        self._release()
        reserve_connections(len(rows), FILES_PER_SAMPLE if isinstance(self._act, RolloutTurns) else 1)
        pool = Pool(
            len(rows),
            over_provisioning=1.0,
            max_staleness=None,
            budget=self._budget,
            has_tools=self._act is not None,
            has_environments=self._environments is not None or isinstance(self._act, RolloutTurns),
        )
        driver = RolloutDriver(
            pool,
            self._engine,
            run_id=self._run_id,
            seed=self._sampling.seed,
            idle_timeout=self._args.vllm_server_timeout,
            server_of=self._engine.server_of,
            images_of=self._images_of,
            act=self._act,
            threads=None if self._act is None else self._act.threads,
        )
        try:
            self._groups = run_blocking(
                RoundLoop(pool, driver, _Steps(self, recovery, rows)).run(self._version)
            ).groups
        finally:
            self._loop.run(driver.close())
        rows[:] = batch_rows(self._groups)
        environments = self._environments
        return HandOver(
            self._groups,
            factories=None if environments is None else environments.factories,
            environments=None if environments is None else environments.of(self._groups),
        )

    def close(self) -> None:
        """Close connections and threads."""
        with ExitStack() as rest:
            rest.callback(self._loop.close)
            rest.callback(lambda: self._loop.run(self._engine.close()))
            self._release()

    def new_groups(self, rows: list[Row]) -> list[NewGroup]:
        """A group with a single sample for each row, in this process."""
        groups = []
        for row, prompt_ids in zip(rows, self._tokenize(rows), strict=True):
            check_prompt(self._budget, len(prompt_ids), prompt_name(row))
            groups.append(NewGroup(self._next_id, copy_row(row), prompt_ids, num_generations=1))
            self._next_id += 1
        return groups

    def run(self, driver: RolloutDriver) -> None:
        """Run or continue the round. Raises [`ServerError`] in all processes if any has lost the server."""
        servers, error = self._servers, None
        self._loop.run(self._engine.route_to(servers.addresses, servers.holding, self._version, servers.causes))
        try:
            self._loop.run(
                driver.generate(),
                poll=self._processes.check,
                calls=None if self._act is None else self._act.user_code.calls,
            )
        except ServerError as caught:
            error = caught
        if self._processes.any(error is not None):
            raise error or ServerError("Another process has lost the server.")

    def _release(self) -> None:
        if self._environments is not None:
            self._environments.release(self._groups)
        self._groups = []


class _Steps(RoundSteps):
    """Steps of the only round of an evaluation batch, in the calling thread. Processes share no groups."""

    def __init__(self, evaluation: Evaluation, recovery: Recovery, rows: list[Row]) -> None:
        self._evaluation, self._recovery, self._rows = evaluation, recovery, rows

    def paused(self) -> AbstractContextManager[None]:
        return self._evaluation._loop.paused()

    def next_groups(self, count: int) -> list[NewGroup]:
        return self._evaluation.new_groups(self._rows)

    async def generate(self, driver: RolloutDriver) -> None:
        self._recovery.restore_weights()
        carrying(lambda: self._evaluation.run(driver))
        self._recovery.progress_was_made()

    async def recover(self, error: ServerError | RoundSuspended, record: Round) -> None:
        self._recovery.wait_for_server(error)


@contextmanager
def evaluation(trainer: GRPOTrainer) -> Iterator[None]:
    """Generate the completions of an evaluation by the driver of training, in this context."""
    server, options, processes = trainer.vllm_generation, trainer._april_options, trainer._april_processes
    turns = tool_turns(trainer, options, trainer._april_rollout, evaluates=True)
    sampled = sampling(trainer)
    vocab_size = trainer.model.config.get_text_config().vocab_size
    found = Evaluation(
        trainer.args,
        turns,
        rollout_engine(options, sampled, server, vocab_size, processes.rank),
        sampled,
        budget=budget_of(trainer, sampled),
        tokenize=tokenize_prompts(trainer, turns),
        images_of=sample_images(trainer),
        servers=server.servers,
        processes=processes,
        version=trainer.state.global_step,
    )
    try:
        with replaced(trainer, _april_evaluation=found):
            yield
    finally:
        found.close()
        if turns is not None:
            turns.close()
        if trainer._april_session is None:  # outside of training
            server.servers.give_up()
