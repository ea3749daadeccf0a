"""Agents by address: tokens of conversations that continue, branch, are cut, end and come back from a checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from types import SimpleNamespace

import openai
import psutil
import pytest
import requests
from openai import AsyncOpenAI

from tests.agents.agent_runs import (
    HEADER_TEXT,
    TOOL,
    Model,
    ask,
    client,
    continued,
    new_pool,
    outcome,
    play,
    question,
    result,
    resumed,
    rollout_turns,
)
from tests.server.test_process import wait_for
from tests.support.tool_calling import END, TOKENIZER, call, encode
from trl_april.agents import address
from trl_april.agents.command import CommandRollout
from trl_april.agents.transcript import Transcript, _Turn, normalized
from trl_april.errors import ConfigError
from trl_april.server.process import session_members


def user(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def works(messages, send, then=()):
    """An agent's loop: tools until there is no call, then further questions. Returns its answers."""
    answers, further = [], [*then]
    while True:
        choice = send(messages)
        answers.append(choice.message.content)
        messages = [*messages, choice.message.model_dump(exclude_none=True)]
        for made in choice.message.tool_calls or ():
            given = json.loads(made.function.arguments)
            result = str(given["a"] * given["b"])
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
        if not choice.message.tool_calls:
            if not further:
                return answers
            messages += question(further.pop(0))


def agent(prompt, engine, row):
    """Two calls of tools, and five turns in all."""
    with client(engine) as api:
        send = lambda messages: ask(api, messages, tools=[TOOL])  # noqa: E731
        answers = works(question("call 3 4"), send, ["call 5 6", "Bye"])
    return {"answers": answers}


async def async_agent(prompt, engine, row):
    messages, answers, further = question("call 3 4"), [], ["call 5 6", "Bye"]
    async with AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=0) as api:
        while True:
            stream = await api.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True)
            content, calls = "", []
            async for chunk in stream:
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    calls += [made.model_dump(exclude={"index"}) for made in choice.delta.tool_calls or ()]
            answers.append(content or None)
            messages = [*messages, {"role": "assistant", "content": content or None}]
            if calls:
                messages[-1]["tool_calls"] = calls
                given = json.loads(calls[0]["function"]["arguments"])
                result = str(given["a"] * given["b"])
                messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": result})
            elif further:
                messages += question(further.pop(0))
            else:
                return {"answers": answers}


COMPLETION = (
    "I call.\n" + call("multiply", a=3, b=4) + END + result(12) + "Re: <tool_response>\n12\n</tool_response>" + END
    + "\n" + user("call 5 6") + HEADER_TEXT + "I call.\n" + call("multiply", a=5, b=6) + END + result(30)
    + "Re: <tool_response>\n30\n</tool_response>" + END + "\n" + user("Bye") + HEADER_TEXT + "Re: Bye" + END
)  # fmt: skip


@pytest.mark.parametrize("rollout", [agent, async_agent])
def test_turns_in_pieces_are_those_of_whole_ones(acts, rollout):
    pool = new_pool()
    play(pool, acts(rollout))
    ((prompt, text, logprobs, versions, reason, columns),) = outcome(pool)
    assert text == COMPLETION and reason == "stop" and len(columns["answers"]) == 5
    assert user("call 3 4") + HEADER_TEXT in prompt and '"name": "multiply"' in prompt
    shown = "".join(TOKENIZER.decode(id) for id, v in zip(encode(text), versions, strict=True) if v is not None)
    assert shown.count(END) == 5 and "user" not in shown, "what the template adds has no version"
    assert [value == 0 for value in logprobs] == [version is None for version in versions]
    for piece in (1, 17):
        again = new_pool()
        play(again, acts(rollout), piece=piece)
        assert outcome(again) == outcome(pool) and again.counters.tokens_branched == 0


# Branches


def test_what_an_sdk_changes_is_no_branch(acts):
    def changes(prompt, engine, row):
        with client(engine) as api:
            first = ask(api, question("call 1 2"), tools=[TOOL]).message
            (made,) = first.tool_calls
            function = {"arguments": '{"b":2,  "a":1}', "name": "multiply"}
            echo = {"role": "assistant", "content": [{"type": "text", "text": "I  call.\n"}], "tool_calls": [
                {"id": "other", "type": "function", "function": function}]}  # fmt: skip
            told = {"role": "tool", "content": "2", "tool_call_id": "other"}
            ask(api, [{"content": "call 1 2 ", "role": "user"}, echo, told], tools=[TOOL], max_tokens=500)

    pool = new_pool()
    play(pool, acts(changes))
    assert pool.counters.tokens_branched == 0 and len(pool._groups[0].samples[0].segments) == 3


def test_a_rewritten_history_is_a_branch_and_the_last_is_trained(acts, caplog):
    def compacts(prompt, engine, row):
        with client(engine) as api:
            ask(api, [*continued(api, question("A")), *question("B")])
            return {"last": ask(api, [{"role": "system", "content": "Short."}, *question("C")]).message.content}

    pool = new_pool()
    play(pool, acts(compacts))
    ((prompt, text, *_, columns),) = outcome(pool)
    assert text == "Re: C" + END and "system\nShort." in prompt and columns == {"last": "Re: C"}
    assert pool.counters.tokens_branched == len(encode("Re: A" + END + "Re: B" + END))
    assert "message 0 was ('user', 'A') and is ('system', 'Short.')" in caplog.text


def test_a_branch_keeps_the_turns_that_it_shares_and_may_be_entered_again(acts):
    def returns(prompt, engine, row):
        with client(engine) as api:
            start = continued(api, question("A"))
            first = continued(api, [*start, *question("B")])
            ask(api, [*start, *question("C")])
            ask(api, [*first, *question("D")])

    pool = new_pool()
    asked = play(pool, acts(returns))
    ((_, text, _, versions, *_),) = outcome(pool)
    turns = [part.split(END)[0] for part in text.split(HEADER_TEXT)]
    assert turns == ["Re: A", "Re: B", "Re: D"] and len(asked) == 4, "no turn is generated again"
    assert pool.counters.tokens_branched == len(encode("Re: C" + END))
    assert sum(version is not None for version in versions) == len(encode("".join(f"Re: {x}{END}" for x in "ABD")))


def test_an_answer_that_another_begins_with_is_another(acts):
    answers = iter(["Yes.", "Yes", "Because."])

    class Votes(Model):
        def rest(self, token_ids, index):
            text = encode(next(answers) + END)
            return text, [-0.5] * len(text)

    def explains(prompt, engine, row):
        with client(engine) as api:
            first, _ = continued(api, question("Q")), continued(api, question("Q"))
            ask(api, [*first, *question("Why?")])

    pool = new_pool()
    play(pool, acts(explains), Votes())
    assert outcome(pool)[0][1] == f"Yes.{END}\n{user('Why?')}{HEADER_TEXT}Because.{END}"


def test_a_conversation_may_have_a_thousand_turns():
    messages = [*question("Q"), {"role": "assistant", "content": "A"}]
    later = []
    for _ in range(1000):
        later = [_Turn([*map(normalized, messages)], array("i", [1]), messages[1], True, later)]
    transcript = Transcript(SimpleNamespace(follow_up=lambda *args, **options: [2]))
    transcript._first["null"] = later
    assert transcript.place([*messages * 1000, *question("Q")], None).token_ids == [1] * 1000 + [2]


def test_ten_requests_at_once_are_branches_in_sequence(acts):
    def opens(prompt, engine, row):
        with client(engine) as api:
            with ThreadPoolExecutor(10) as threads:
                list(threads.map(lambda n: ask(api, question(f"Q{n}")), range(10)))

    pool = new_pool()
    play(pool, acts(opens), piece=3)
    ((prompt, text, *_),) = outcome(pool)
    assert text.startswith("Re: Q") and text[4:6] in prompt
    assert pool.counters.tokens_branched == 9 * len(encode("Re: Q0" + END))


# Limits, and agents that misbehave


def test_max_tokens_limits_a_turn_and_the_budget_the_sample(acts):
    seen = []

    def limited(prompt, engine, row):
        with client(engine) as api:
            messages = question("A")
            for limit in (4, 5, 1000):
                choice = ask(api, messages, max_tokens=limit)
                seen.append((choice.message.content, choice.finish_reason))
                messages = [*messages, {"role": "assistant", "content": choice.message.content}, *question("long" * 9)]
            with pytest.raises(openai.BadRequestError, match="leave no room") as refused:
                ask(api, messages)
            assert refused.value.code == "context_length_exceeded"

    pool = new_pool(budget=200)
    play(pool, acts(limited), piece=3)
    ((_, text, *_, reason, _),) = outcome(pool)
    assert seen == [("Re:", "length"), ("Re: l", "length"), ("Re: " + "long" * 9, "stop")]
    assert text.startswith("Re: " + END + "\n" + user("long" * 9)), "the template's end of a turn that was cut short"


def raises(prompt, engine, row):
    with client(engine) as api:
        ask(api, question("A"))
    raise OSError("gone")


def fails(prompt, engine, row):
    with client(engine) as api:
        ask(api, question("A"), temperature=0.5)


@pytest.mark.parametrize(
    ("rollout", "error", "message"),
    [
        (lambda prompt, engine, row: {}, ConfigError, "did not begin with a turn .*send a request to engine.base_url"),
        (raises, OSError, "gone"),
        (fails, openai.BadRequestError, "temperature=0.5 differs from the trainer's 1.0"),
    ],
)
def test_errors_of_an_agent_reach_the_round(acts, rollout, error, message):
    with pytest.raises(error, match=message):
        play(new_pool(), acts(rollout))


def test_an_agent_that_hangs_ends_its_sample(acts, caplog):
    never = threading.Event()
    turns = []

    def hangs(prompt, engine, row):
        with client(engine) as api:
            turns.append(ask(api, question("A")).message.content)
            if len(turns) == 1:
                return {"score": 1}
            never.wait()

    pool = new_pool(2)
    play(pool, acts(hangs, timeout=1.5))
    never.set()
    assert [columns for *_, columns in outcome(pool)] == [{"score": 1}, {"score": None}]
    assert "nor returned within 1.5 seconds" in caplog.text
    first = threading.Event()
    with pytest.raises(ConfigError, match="no turn within 0.2 seconds .*3 times"):
        play(new_pool(), acts(lambda prompt, engine, row: first.wait(), timeout=0.2))
    first.set()


def test_an_agent_that_never_stops_asking_beyond_its_budget_ends(acts):
    def insists(prompt, engine, row):
        with client(engine) as api:
            while True:
                try:
                    ask(api, [*question("x" * 3000)] if attempts else question("A"))
                except openai.BadRequestError:
                    pass
                attempts.append(None)

    attempts = []
    pool = new_pool(context_length=2000)
    play(pool, acts(insists))
    assert outcome(pool)[0][1] == "Re: A" + END and len(attempts) >= 32


def test_a_first_request_that_is_too_long_may_be_shortened(acts):
    def shortens(prompt, engine, row):
        with client(engine) as api:
            with pytest.raises(openai.BadRequestError, match="leave no room"):
                ask(api, question("A" * 4000))
            ask(api, question("A"))

    def insists(prompt, engine, row):
        with client(engine) as api:
            while True:
                with suppress(openai.BadRequestError):
                    ask(api, question("A" * 4000))

    pool = new_pool()
    play(pool, acts(shortens))
    assert outcome(pool)[0][1] == "Re: A" + END
    with pytest.raises(ConfigError, match=r"The first request of the rollout of row 0 \(.*q0.*\) has 4\d+ tokens"):
        play(new_pool(), acts(insists))


def test_a_call_after_the_end_finds_no_address(acts):
    later = []

    def returns(prompt, engine, row):
        api = client(engine)
        ask(api, question("A"))
        later.append(api)

    play(new_pool(), acts(returns))
    with pytest.raises(openai.NotFoundError, match="ends with the sample"):
        ask(later[0], question("B"))


def test_a_request_that_is_repeated_gets_the_answer_that_did_not_arrive(acts):
    """A client that gave up waiting, as SDKs do, and asks again."""
    gave_up = threading.Event()

    class Waiting(Model):
        def rest(self, token_ids, index):
            assert self.asked or gave_up.wait(20)
            return super().rest(token_ids, index)

    def repeats(prompt, engine, row):
        with client(engine, timeout=0.3) as api:
            with pytest.raises(openai.APITimeoutError):
                ask(api, question("A"))
        gave_up.set()
        with client(engine) as api:
            assert ask(api, question("A")).message.content == "Re: A"
            ask(api, question("A"))

    assert len(play(new_pool(), acts(repeats), Waiting())) == 2, "the answer is given once"


class Slow(Model):
    def rest(self, token_ids, index):
        time.sleep(1.5)
        return super().rest(token_ids, index)


@pytest.mark.parametrize("streams", [False, True])
def test_a_slow_answer_shows_signs_of_life(acts, monkeypatch, streams):
    monkeypatch.setattr(address, "HEARTBEAT", 0.1)

    def waits(prompt, engine, row):
        with client(engine, timeout=0.8) as api:
            answer = api.chat.completions.create(model="m", messages=question("A"), stream=streams)
            if streams:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            else:
                text = answer.choices[0].message.content
        return {"text": text}

    pool = new_pool()
    play(pool, acts(waits), Slow())
    assert outcome(pool)[0][-1] == {"text": "Re: A"}


def test_a_stream_that_has_begun_ends_with_the_error(acts, monkeypatch):
    monkeypatch.setattr(address, "HEARTBEAT", 0.1)

    def asks_for_too_much(prompt, engine, row):
        with client(engine) as api, ThreadPoolExecutor() as others:
            first = others.submit(ask, api, question("A"))
            time.sleep(0.3)
            with pytest.raises(openai.APIError, match="leave no room"):
                list(api.chat.completions.create(model="m", messages=question("x" * 700), stream=True))
            first.result()

    play(new_pool(context_length=700), acts(asks_for_too_much), Slow())


def test_proxies_are_not_for_addresses(acts, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    play(new_pool(), acts(lambda prompt, engine, row: ask(client(engine), prompt) and None))


# The door


def test_foreign_requests_are_refused_and_training_continues(acts):
    def knocks(prompt, engine, row):
        origin, url = engine.base_url.rsplit("/", 2)[0], engine.base_url + "/chat/completions"
        key = {"Authorization": f"Bearer {engine.api_key}"}
        good = {"messages": question("A")}
        assert origin.startswith("http://127.0.0.1:")
        for send, status in [
            (lambda: requests.post(url, json=good), 401),
            (lambda: requests.post(url, json=good, headers={"Authorization": "Bearer x"}), 401),
            (lambda: requests.get(engine.base_url + "/models"), 401),
            (lambda: requests.get(url, headers={"Authorization": "Bearer \xe9".encode("latin-1")}), 405),
            (lambda: requests.get(engine.base_url + "/models", headers={"Authorization": b"Bearer \xe9"}), 401),
            (lambda: requests.get(engine.base_url + "/models", headers=key), 200),
            (lambda: requests.get(engine.base_url + "/models/a/model", headers=key), 200),
            (lambda: requests.post(origin + "/other/v1/chat/completions", json=good, headers=key), 404),
            (lambda: requests.post(engine.base_url + "/completions", json=good, headers=key), 404),
            (lambda: requests.get(url, headers=key), 405),
            (lambda: requests.post(url, data=b"x" * 100_000_000, headers=key), 413),
            (lambda: requests.post(url, data=b"\xff\xfenonsense", headers=key), 400),
            (lambda: requests.post(url, data="[" * 100_000, headers=key), 400),
        ]:
            answer = send()
            assert answer.status_code == status, answer.text
            assert status == 200 or answer.json()["error"]["message"]
        for body, words in [
            ([], "not a JSON object"),
            ({}, "messages must be a list"),
            ({"messages": []}, "at least one"),
            ({"messages": ["a"]}, "Message 0 must be an object with a role"),
            ({"messages": [{"role": "user", "content": 3}]}, "must be text"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "Only text"),
            ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "tool_calls of message 0"),
            ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "tool_calls of message 0"),
            ({**good, "tools": [{"name": "f"}]}, "tools must be"),
            ({**good, "tools": 3}, "tools must be"),
            ({**good, "n": 2}, "n=2 is not supported"),
            ({**good, "tool_choice": "required"}, "tool_choice='required' is not supported.*'auto' or 'none'"),
            ({**good, "response_format": {"type": "json_object"}}, "response_format"),
            ({**good, "max_tokens": 0}, "positive integer"),
            ({**good, "max_completion_tokens": "a"}, "positive integer"),
            ({**good, "stop": ["x"]}, r"stop=\['x'\] differs from the trainer's \[\]"),
            ({**good, "seed": 3}, "'seed' is not supported"),
        ]:
            answer = requests.post(url, json=body, headers=key)
            assert answer.status_code == 400
            with pytest.raises(AssertionError, match=words):
                raise AssertionError(answer.json()["error"]["message"])
        accepted = {"temperature": 1, "top_p": 1.0, "stop": [], "n": 1, "tool_choice": "none", "user": "me"}
        answer = requests.post(url, json={**good, **accepted, "seed": None}, headers=key).json()
        assert answer["usage"]["completion_tokens"] == len(encode("Re: A" + END))
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Re: A", "refusal": None}

    pool = new_pool()
    assert len(play(pool, acts(knocks))) == 1


def test_no_call_is_answered_where_calls_are_not_wanted(acts):
    def declines(prompt, engine, row):
        with client(engine) as api:
            for options in ({"tools": [TOOL], "tool_choice": "none"}, {}):
                choice = ask(api, question("call 1 2"), **options)
                assert choice.message.tool_calls is None and choice.finish_reason == "stop"
                assert choice.message.content == "I call.\n" + call("multiply", a=1, b=2), "agents may read it there"

    play(new_pool(), acts(declines))


# Checkpoints


def test_an_agent_that_hangs_when_it_starts_anew_is_ended(acts):
    ended, started = threading.Event(), []

    def hangs(prompt, engine, row):
        started.append(engine)
        if len(started) > 1:
            return agent(prompt, engine, row)
        engine.at_close(ended.set)
        ended.wait(20)

    pool = new_pool()
    play(pool, acts(agent), Model(), piece=29, most=3)
    again = acts(hangs, timeout=0.5)
    resumed(pool, again)
    assert ended.is_set() and again.take_restored()[1] == 1


def branching(prompt, engine, row):
    """As an agent that compacts its history, and retries."""
    with client(engine) as api:
        start = continued(api, question("A"))
        ask(api, [*start, *question("B")])
        ask(api, [*start, *question("C")])
        ask(api, question("summary"))
        return {"last": ask(api, [*start, *question("D")]).message.content}


def voting(prompt, engine, row):
    """As an agent that votes, continues an early answer, and is refused a request that is too long."""
    with client(engine) as api:
        for _ in range(3):
            vote = continued(api, question("A"))
        with pytest.raises(openai.BadRequestError):
            ask(api, [*vote, *question("x" * 600)])
        cut = ask(api, question("B" * 600))
        other = continued(api, [*vote, *question("C")])
        ask(api, [*vote, *question("E")])
        ask(api, [*other, *question("D")])
    return {"last": cut.finish_reason}


@cache
def whole(rollout):
    """What a training without an interruption has: the outcome, and tokens of left branches."""
    turns, pool = rollout_turns(rollout), new_pool()
    play(pool, turns)
    turns.close()
    return outcome(pool), pool.counters.tokens_branched


@pytest.mark.parametrize(
    ("rollout", "piece", "most"),
    [
        *((branching, 5, most) for most in range(1, 12)),
        *((agent, 29, most) for most in (1, 3, 9, 14)),
        *((voting, 1000, most) for most in range(1, 7)),
    ],  # fmt: skip
)
@pytest.mark.parametrize("acts_last", [True, False])
def test_branches_come_back_from_a_checkpoint(acts, rollout, piece, most, acts_last):
    """And turns with tools."""
    pool, model = new_pool(), Model()
    play(pool, acts(rollout), model, piece=piece, most=most, acts_last=acts_last)
    again = acts(rollout)
    pool = resumed(pool, again)
    assert again.take_restored()[1] == 0
    play(pool, again, model)
    assert (outcome(pool), pool.counters.tokens_branched) == whole(rollout)
    votes = 2 if rollout is voting else 0
    assert len(model.asked) - len({tuple(ids) for ids in model.asked}) == votes, "no token is generated twice"


def test_an_agent_that_differs_after_a_checkpoint_opens_a_branch(acts, caplog):
    texts = iter(["B", "other"])

    def differs(prompt, engine, row):
        with client(engine) as api:
            second = continued(api, [*continued(api, question("A")), *question(next(texts))])
            ask(api, [*second, *question("C")])

    pool, model = new_pool(), Model()
    play(pool, acts(differs), model, most=3, acts_last=False)
    again = acts(differs)
    pool = resumed(pool, again)
    assert again.take_restored()[1] == 1 and "1 samples start again, and lose" in caplog.text
    play(pool, again, model)
    ((_, text, *_),) = outcome(pool)
    assert [part.split(END)[0] for part in text.split(HEADER_TEXT)] == ["Re: A", "Re: other", "Re: C"]
    assert len(model.asked) == 5, "the turn before the difference is not generated again"


# Programs


PROGRAM = """
import json, os, sys
from urllib.request import Request, urlopen
row = json.load(sys.stdin)
print("a log line")
body = json.dumps({"messages": row["prompt"]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
answer = json.load(urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)))
text = answer["choices"][0]["message"]["content"]
if "--fail" in sys.argv:
    sys.exit("it broke")
if "--hang" in sys.argv:
    import time
    time.sleep(1000)
if "--text" not in sys.argv:
    print(json.dumps({"text": text}))
if "--helper" in sys.argv:
    import subprocess
    subprocess.Popen(["sleep", "1000"])
    sys.stdout.flush()
    sys.stderr.buffer.write(b"\\xff")
    print(json.dumps({"text": "\u2028\x85"}, ensure_ascii=False))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "an agent.py"
    path.write_text(PROGRAM)
    return f'{sys.executable} "{path}"'


def test_a_program_is_an_agent(acts, program):
    pool = new_pool()
    play(pool, acts(CommandRollout(program)))
    assert outcome(pool)[0][-1] == {"text": "Re: q0"}
    pool = new_pool()
    play(pool, acts(CommandRollout(f"{program} --helper"), timeout=30.0))
    assert outcome(pool)[0][-1] == {"text": "\u2028\x85"}, "it ended, whoever still has its output"


@pytest.mark.parametrize(
    ("flag", "error", "message"),
    [
        ("--fail", RuntimeError, "exited with status 1. Its last lines:\nit broke"),
        ("--text", ConfigError, "The last line that .* wrote is 'a log line'"),
    ],
)
def test_errors_of_a_program_reach_the_round(acts, program, flag, error, message):
    with pytest.raises(error, match=message):
        play(new_pool(), acts(CommandRollout(f"{program} {flag}")))


def test_a_program_ends_with_its_sample(acts, program):
    pool = new_pool()
    act = acts(CommandRollout(f"{program} --hang"), timeout=2.0)
    play(pool, act)
    assert outcome(pool)[0][1] == "Re: q0" + END
    with pytest.raises(ConfigError, match="cannot be run"):
        play(new_pool(), acts(CommandRollout("no-such-program-anywhere")))
    with pytest.raises(ConfigError, match="must name a program"):
        CommandRollout(" ")


ONE_PROGRAM = """
from types import SimpleNamespace
from trl_april.agents.command import CommandRollout
engine = SimpleNamespace(base_url="", api_key="", at_close=lambda end: None)
CommandRollout("sleep 100")([], engine, {})
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="only util-linux has setpriv")
def test_a_program_ends_with_a_trainer_that_is_killed():
    trainer = subprocess.Popen([sys.executable, "-c", ONE_PROGRAM])
    try:
        wait_for(lambda: psutil.Process(trainer.pid).children())
        (program,) = psutil.Process(trainer.pid).children()
        wait_for(lambda: program.name() == "sleep")
    finally:
        trainer.kill()
        trainer.wait()
    wait_for(lambda: not session_members(program.pid))
