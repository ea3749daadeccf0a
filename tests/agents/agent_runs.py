"""Samples that act between their turns: a scripted model, and a pool that the tests drive."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

from openai import OpenAI

from tests.support.tiny import build_chat_tokenizer
from tests.support.tool_calling import END, HEADER, TOKENIZER, call, encode
from trl_april.agents.address import AddressServer
from trl_april.agents.rollout_function import RolloutTurns
from trl_april.bridge.chat_format import TrainersChatFormat
from trl_april.pool.budget import Budget
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, SampleState
from trl_april.pool.state import restore, state_dict
from trl_april.rollout.acting import ResetResult
from trl_april.rollout.user_code import UserCode


TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
HEADER_TEXT = TOKENIZER.decode(HEADER)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "stop": []}


class Model:
    """Answers a question with its text, `call` with a call of a tool, and a result with that result."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []  # token ids before each request

    @staticmethod
    def turn(question: str) -> str:
        if found := re.search(r"call (\d+) (\d+)", question):
            return "I call.\n" + call("multiply", a=int(found[1]), b=int(found[2])) + END
        return f"Re: {question.strip()}" + END

    def rest(self, token_ids: list[int], index: int = 0) -> tuple[list[int], list[float]]:
        self.asked.append(token_ids)
        start = next(n for n in range(len(token_ids), 0, -1) if token_ids[n - len(HEADER) : n] == HEADER)
        text = TOKENIZER.decode(token_ids[: start - len(HEADER)])
        turn = encode(self.turn(re.split(r"<\|im_start\|>user\n", text)[-1].split("<|im_end|>")[0]))
        done = token_ids[start:]
        assert done == turn[: len(done)], "resumed with other tokens"
        return turn[len(done) :], [-((start + n) % 16 + 1) / 16 for n in range(len(done), len(turn))]


def rollout_turns(rollout, *, timeout=None, stop=()) -> RolloutTurns:
    user_code, tokenizer = UserCode(), build_chat_tokenizer()
    trainer = SimpleNamespace(
        processing_class=tokenizer, chat_template=None, chat_template_kwargs={}, _is_vlm=False,
        eos_token_ids=[tokenizer.eos_token_id],
    )  # fmt: skip
    chat_format = TrainersChatFormat(trainer)
    server = AddressServer(chat_format, "tiny", {**SAMPLING, "stop": [*stop]})
    return RolloutTurns(
        rollout,
        lambda prompt: TOKENIZER.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"],
        user_code,
        timeout=timeout,
        address_of=server.open,
        close_addresses=server.close,
    )


def result(text) -> str:
    """The result of a tool, and the header of the next turn."""
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n" + HEADER_TEXT


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def row_of(index: int) -> dict:
    return {"prompt": question(f"q{index}")}


def new_pool(samples: int = 1, *, budget: int = 600, context_length: int = 4000) -> Pool:
    pool = Pool(1, over_provisioning=1.0, has_environments=True, budget=Budget(budget, context_length))
    pool.begin_round(0)
    pool.admit(0, row_of(0), [], num_generations=samples, row_index=0)
    return pool


def resumed(pool: Pool, acts) -> Pool:
    """The pool after the death of its process."""
    state = state_dict(pool)
    arrays = {name: state.pop(name) for name in ("token_ids", "logprobs")}
    again = Pool(
        pool.schedule.quota, over_provisioning=pool.schedule.over_provisioning, max_staleness=None,
        has_environments=True, dynamic_sampling=pool.dynamic_sampling, budget=pool.budget,
    )  # fmt: skip
    state = {**json.loads(json.dumps(state)), **arrays}
    restore(again, [state], read_row=row_of, restore_environments=acts.restore)
    again.begin_round(0)
    again.check()
    return again


def generate(pool, group, sample, model, piece=1000) -> None:
    """A request for at most `piece` tokens."""
    rest, logprobs = model.rest([*group.prompt_ids_of(sample), *sample.token_ids], sample.index)
    room = group.remaining_in_turn(sample)
    length = min(len(rest), room, piece)
    pool.record(sample, rest[:length], logprobs[:length])
    if length == len(rest):
        pool.finish(sample, FinishReason.STOP)
    elif length == room:
        pool.finish(sample, FinishReason.LENGTH)
    else:
        pool.park(sample)


def land(pool, group, sample, acts) -> None:
    """What follows a turn, or comes before the first."""
    result = acts(group, sample)
    if isinstance(result, ResetResult):
        pool.reset_ended(sample, result.prompt, result.prompt_ids, result.environment, result.turn_limit)
    elif result.branch is not None:
        pool.branch(sample, result.branch)
    else:
        pool.act_ended(
            sample, json.loads(json.dumps(result.messages)), result.token_ids, calls=result.calls,
            failures=result.failures, is_complete=result.is_complete, environment=result.environment,
            columns=result.columns, turn_limit=result.turn_limit,
        )  # fmt: skip
    pool.check()


def step(pool, group, sample, acts, model, piece=1000) -> None:
    """A request, if the sample does not act first, and what follows its turn."""
    pool.start(sample)
    if sample.state is SampleState.RUNNING:
        generate(pool, group, sample, model, piece)
    if sample.state is SampleState.ACTING:
        land(pool, group, sample, acts)


def play(pool, acts, model=None, *, piece=1000, most=None, acts_last=True) -> list[list[int]]:
    """Generate in requests of at most `piece` tokens, until all are finished or have made `most` of them.

    Returns the token ids before each request. Without `acts_last`, the last turn of a sample is not delivered.
    """
    model = model or Model()
    for group in pool:
        for index in range(len(group.samples)):
            made = 0
            while (sample := group.samples[index]).state is not SampleState.FINISHED and made != most:
                pool.start(sample)
                if sample.state is SampleState.RUNNING:
                    made += 1
                    generate(pool, group, sample, model, piece)
                if sample.state is SampleState.ACTING:
                    if made == most and not acts_last:
                        break
                    land(pool, group, sample, acts)
    return model.asked


def client(engine, **options) -> OpenAI:
    return OpenAI(base_url=engine.base_url, api_key=engine.api_key, **{"max_retries": 0, **options})


def ask(client, messages, **options):
    return client.chat.completions.create(model="any", messages=messages, **options).choices[0]


def continued(client, messages):
    """The messages, and the answer to them."""
    return [*messages, {"role": "assistant", "content": ask(client, messages).message.content}]


def outcome(pool):
    return [
        (TOKENIZER.decode(group.prompt_ids_of(sample)), TOKENIZER.decode(sample.token_ids.tolist()),
         sample.logprobs.tolist(), sample.versions, sample.finish_reason, sample.conversation.columns)
        for group in pool for sample in group.samples
    ]  # fmt: skip
