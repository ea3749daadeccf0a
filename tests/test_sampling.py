"""Which sampling options a request carries, and which are refused because a cut sample could not keep them."""

import pytest

from trl_april.attachment import evaluation_kwargs
from trl_april.config import APRILGRPOConfig
from trl_april.errors import ConfigError
from trl_april.sampling import SamplingOptions, sampling_options


def options(**changes) -> SamplingOptions:
    """What `GRPOConfig`'s defaults give, with changes."""
    return sampling_options(
        **{
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "stop_token_ids": [2],
            **changes,
        }
    )


def test_defaults():
    assert options() == SamplingOptions(
        {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [2],
        },
        min_tokens=0,
        seed=None,
    )


def test_every_argument_arrives():
    body = options(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1).body
    assert body == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [2],
    }


def test_generation_kwargs_win_and_are_not_changed():
    extra = {"temperature": 0.5, "logit_bias": {"3": -100}, "seed": 4, "min_tokens": 5}
    given = dict(extra)
    made = options(generation_kwargs=extra)
    assert (made.body["temperature"], made.body["logit_bias"]) == (0.5, {"3": -100})
    assert extra == given


def test_seed_and_least_length_are_per_request_and_leave_the_common_part():
    """Pinned: equal seeds give equal completions, and the least length shrinks with what is already generated."""
    made = options(generation_kwargs={"seed": 11, "min_tokens": 8})
    assert (made.seed, made.min_tokens) == (11, 8)
    assert "seed" not in made.body
    assert "min_tokens" not in made.body
    assert options(generation_kwargs={"seed": 0}).seed == 0


def test_stop_token_ids_of_user_and_model_are_both_sent():
    assert options(stop_token_ids=[9, 2]).body["stop_token_ids"] == [2, 9]
    assert options(generation_kwargs={"stop_token_ids": [5, 2]}).body["stop_token_ids"] == [2, 5]
    assert options(generation_kwargs={"stop_token_ids": None}).body["stop_token_ids"] == [2]


def test_a_tokenizer_without_an_end_stops_nothing():
    """TRL's `eos_token_ids` hold its `None`, beside those of the model's generation config."""
    assert options(stop_token_ids=[None]).body["stop_token_ids"] == []
    assert options(stop_token_ids=[None, 9, 2]).body["stop_token_ids"] == [2, 9]


def test_nothing_stops_a_completion_under_ignore_eos():
    assert "stop_token_ids" not in options(generation_kwargs={"ignore_eos": True}).body
    assert options(generation_kwargs={"ignore_eos": False}).body["stop_token_ids"] == [2]


@pytest.mark.parametrize(
    ("name", "value", "reason", "remedy"),
    [
        ("presence_penalty", 0.5, "count would restart at every cut", "repetition_penalty"),
        ("frequency_penalty", -0.5, "count would restart at every cut", "repetition_penalty"),
        ("stop", ["\n\n"], "straddles a cut", "stop_token_ids"),
        ("stop", "END", "straddles a cut", "stop_token_ids"),
        ("bad_words", ["no"], "straddles a cut", "logit_bias"),
        ("structured_outputs", {"json": {}}, "begin anew", "GRPOTrainer"),
        ("response_format", {"type": "json_object"}, "begin anew", "GRPOTrainer"),
        ("repetition_detection", {"max_pattern_size": 3}, "begin anew", "GRPOTrainer"),
        ("thinking_token_budget", 10, "begin anew", "GRPOTrainer"),
        ("use_beam_search", True, "begin anew", "sampled"),
    ],
)
def test_what_a_cut_cannot_preserve_is_refused_with_value_rule_and_remedy(name, value, reason, remedy):
    with pytest.raises(ConfigError) as caught:
        options(generation_kwargs={name: value})
    for word in (f"{name}={value!r}", "partial rollouts", reason, remedy):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("presence_penalty", 0.0),
        ("presence_penalty", 0),
        ("frequency_penalty", None),
        ("stop", []),
        ("stop", None),
        ("bad_words", []),
        ("structured_outputs", None),
        ("use_beam_search", False),
    ],
)
def test_what_is_switched_off_is_no_obstacle(name, off):
    assert options(generation_kwargs={name: off}).body["temperature"] == 1.0


def test_the_servers_own_penalties_do_not_count():
    """Those of its `--override-generation-config` would count the output of one request only."""
    for given in ({}, {"presence_penalty": None, "frequency_penalty": 0}):
        body = options(generation_kwargs=given).body
        assert (body["presence_penalty"], body["frequency_penalty"]) == (0.0, 0.0)


def test_what_cannot_be_sent_is_refused_before_training():
    assert options(generation_kwargs={"logit_bias": {4: -100}}).body["logit_bias"] == {4: -100}
    with pytest.raises(ConfigError, match="generation_kwargs cannot be sent .* as JSON: .*not JSON serializable: set"):
        options(generation_kwargs={"allowed_token_ids": {4, 5}})


def test_a_regular_expression_of_the_config_is_refused_too():
    with pytest.raises(ConfigError, match=r"vllm_structured_outputs_regex='a\+'.*partial rollouts"):
        options(structured_outputs_regex="a+")


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("max_tokens", 5, "max_completion_length"),
        ("n", 1, "num_generations"),
        ("prompt", "x", "the dataset"),
        ("model", "m", "the server"),
        ("stream", False, "always streamed"),
        ("stream_interval", 8, "APRILGRPOConfig"),
        ("logprobs", 5, "always recorded"),
        ("prompt_logprobs", 1, "only completion tokens"),
        ("echo", True, "only completion tokens"),
        ("cache_salt", "x", "policy versions apart"),
        ("return_token_ids", False, "always returned"),
        ("truncate_prompt_tokens", 5, "shorten its prompts"),
    ],
)
def test_what_is_set_elsewhere_is_refused_with_the_place(name, value, place):
    with pytest.raises(ConfigError) as caught:
        options(generation_kwargs={name: value})
    for word in (f"{name}={value!r}", place, "Remove it"):
        assert word in str(caught.value)


def test_a_negative_least_length_is_refused():
    with pytest.raises(ConfigError, match="min_tokens=-1; it cannot be negative"):
        options(generation_kwargs={"min_tokens": -1})


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (None, {"stop_token_ids": [2, 5]}),
        ({"stop_token_ids": [7], "logit_bias": {3: 1.0}}, {"stop_token_ids": [2, 5, 7], "logit_bias": {3: 1.0}}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
    ],
)
def test_evaluation_ends_where_training_does(own, expected):
    args = APRILGRPOConfig("out", use_cpu=True, bf16=False, generation_kwargs=own)
    assert evaluation_kwargs(args, [5, None, 2]) == expected
