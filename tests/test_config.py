"""APRIL's options: defaults, the command line and YAML, and refusals that say what to do."""

import dataclasses
import json
import math

import pytest
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from trl_april.config import APRILGRPOConfig, AprilOptions
from trl_april.errors import AprilError, ConfigError
from trl_april.session import make_pool


CPU = {"use_cpu": True, "bf16": False}
OWN = {
    "over_provisioning": 1.5,
    "max_staleness": 3,
    "staleness_policy": "ignore",
    "resume_kv": "reuse",
    "overlap_generation": True,
    "dynamic_sampling": True,
    "max_rejected_groups_per_round": 40,
    "weight_sync": "filesystem",
    "weight_sync_dir": "/some/where",
    "stream_interval": 32,
    "save_on_signal": True,
    "max_parked_tokens": 1_000_000,
}


def own(args: APRILGRPOConfig) -> dict:
    return {name: getattr(args, name) for name in OWN}


def test_defaults():
    args = APRILGRPOConfig("out", **CPU)
    assert own(args) == {
        "over_provisioning": 2.0,
        "max_staleness": 5,
        "staleness_policy": "wait",
        "resume_kv": "recompute",
        "overlap_generation": False,
        "dynamic_sampling": False,
        "max_rejected_groups_per_round": None,
        "weight_sync": "auto",
        "weight_sync_dir": None,
        "stream_interval": 64,
        "save_on_signal": False,
        "max_parked_tokens": None,
    }


def test_exactly_these_fields_are_new_and_these_defaults_changed():
    """Pinned: whatever else a user sets means what it means to TRL."""
    ours = {field.name: field for field in dataclasses.fields(APRILGRPOConfig)}
    trls = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    assert ours.keys() - trls.keys() == set(OWN)
    changed = {
        name
        for name, field in trls.items()
        if (field.default, field.default_factory) != (ours[name].default, ours[name].default_factory)
    }
    assert changed == {"use_vllm", "vllm_mode", "vllm_importance_sampling_mode"}
    assert ours["use_vllm"].default is True
    assert ours["vllm_mode"].default == "server"
    assert ours["vllm_importance_sampling_mode"].default == "token_truncate"


@pytest.mark.parametrize("name", [*OWN, "use_vllm", "vllm_mode", "vllm_importance_sampling_mode"])
def test_every_field_is_explained(name):
    (field,) = [field for field in dataclasses.fields(APRILGRPOConfig) if field.name == name]
    assert field.metadata["help"].endswith(".")
    assert "%" not in field.metadata["help"]  # argparse would format it
    assert name in APRILGRPOConfig.__doc__


def test_the_fields_of_the_options_are_those_of_the_config():
    assert {field.name for field in dataclasses.fields(AprilOptions)} == set(OWN)
    defaults = AprilOptions()
    assert AprilOptions.of(APRILGRPOConfig("out", **CPU)) == defaults


def test_options_are_taken_from_the_config():
    assert dataclasses.asdict(AprilOptions.of(APRILGRPOConfig("out", **CPU, **OWN))) == OWN


def test_a_stock_config_gives_default_options():
    assert AprilOptions.of(GRPOConfig("out", **CPU)) == AprilOptions()


COMMAND_LINE = [
    *("--output_dir", "out"),
    *("--use_cpu", "true"),
    *("--bf16", "false"),
    *("--over_provisioning", "1.5"),
    *("--max_staleness", "3"),
    *("--staleness_policy", "ignore"),
    *("--resume_kv", "reuse"),
    *("--overlap_generation", "true"),
    *("--dynamic_sampling", "true"),
    *("--max_rejected_groups_per_round", "40"),
    *("--weight_sync", "filesystem"),
    *("--weight_sync_dir", "/some/where"),
    *("--stream_interval", "32"),
    *("--save_on_signal", "true"),
    *("--max_parked_tokens", "1000000"),
    *("--num_generations", "4"),
]


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_the_command_line(parser):
    (args,) = parser(APRILGRPOConfig).parse_args_into_dataclasses(COMMAND_LINE)
    assert own(args) == OWN
    assert args.num_generations == 4
    assert (args.use_vllm, args.vllm_mode) == (True, "server")


def test_the_help_of_the_command_line_is_printable(capsys):
    with pytest.raises(SystemExit) as ended:
        TrlParser(APRILGRPOConfig).parse_args_into_dataclasses(["--help"])
    assert ended.value.code == 0
    assert "--over_provisioning" in capsys.readouterr().out


def test_vllm_can_be_switched_off_on_the_command_line():
    (args,) = HfArgumentParser(APRILGRPOConfig).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false", "--use_vllm", "false"]
    )
    assert args.use_vllm is False


def test_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("output_dir: out\nuse_cpu: true\nbf16: false\nmax_staleness: null\nover_provisioning: 9.5\n")
    (args,) = HfArgumentParser(APRILGRPOConfig).parse_yaml_file(path)
    assert (args.max_staleness, args.over_provisioning) == (None, 9.5)


def test_yaml_and_command_line_together(tmp_path):
    """The command line wins over the file, as everywhere in TRL."""
    path = tmp_path / "config.yaml"
    path.write_text("output_dir: out\nuse_cpu: true\nbf16: false\nmax_staleness: null\nover_provisioning: 9.5\n")
    (args,) = TrlParser(APRILGRPOConfig).parse_args_and_config(
        ["--config", str(path), "--stream_interval", "16", "--over_provisioning", "3.5"]
    )
    assert (args.max_staleness, args.over_provisioning, args.stream_interval) == (None, 3.5, 16)


def test_to_dict_round_trip():
    """What `report_to` and `training_args.bin` readers get; it is JSON and makes the same config again."""
    args = APRILGRPOConfig("out", **CPU, **OWN)
    stored = json.loads(args.to_json_string())
    assert {name: stored[name] for name in OWN} == OWN
    assert own(APRILGRPOConfig("out", **CPU, **{name: stored[name] for name in OWN})) == OWN
    assert {name: args.to_sanitized_dict()[name] for name in OWN} == OWN


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"over_provisioning": 0.5}, ["over_provisioning is 0.5", "at least 1.0", "1.0 is synchronous"]),
        ({"over_provisioning": math.nan}, ["over_provisioning is nan", "finite"]),
        ({"over_provisioning": math.inf, "max_staleness": None}, ["over_provisioning is inf", "finite"]),
        (
            {"over_provisioning": 4.5, "max_staleness": 3},
            ["over_provisioning is 4.5", "max_staleness=3", "at most 4", "Lower it, or raise"],
        ),
        ({"over_provisioning": "fast"}, ["over_provisioning is 'fast'", "at least 1.0", "'auto'"]),
        ({"over_provisioning": "0.5"}, ["over_provisioning is 0.5", "at least 1.0"]),
        ({"over_provisioning": None}, ["over_provisioning is None", "a number", "'auto'"]),
        ({"over_provisioning": True}, ["over_provisioning is True", "a number"]),
        ({"over_provisioning": "auto", "max_staleness": -1}, ["max_staleness is -1", "cannot be negative"]),
        ({"over_provisioning": "auto", "staleness_policy": "drop"}, ["staleness_policy is 'drop'"]),
        ({"max_staleness": 0}, ["over_provisioning is 2.0", "max_staleness=0", "at most 1"]),
        ({"max_staleness": -1}, ["max_staleness is -1", "cannot be negative", "None"]),
        ({"max_staleness": -1, "staleness_policy": "ignore"}, ["max_staleness is -1", "cannot be negative"]),
        ({"staleness_policy": "drop"}, ["staleness_policy is 'drop'", "wait, mask, ignore"]),
        ({"max_rejected_groups_per_round": 0}, ["max_rejected_groups_per_round is 0", "at least the groups"]),
        ({"weight_sync": "ftp"}, ["weight_sync is 'ftp'", "auto, nccl, filesystem"]),
        ({"resume_kv": "kept"}, ["resume_kv is 'kept'", "recompute, reuse, keep"]),
        ({"stream_interval": 0}, ["stream_interval is 0", "at least 1"]),
        ({"max_parked_tokens": -1}, ["max_parked_tokens is -1", "cannot be negative", "Leave it out"]),
    ],
)
def test_refusals_name_value_rule_and_remedy(wrong, words):
    for make in (lambda: APRILGRPOConfig("out", **CPU, **wrong), lambda: AprilOptions(**wrong)):
        with pytest.raises(ConfigError) as caught:
            make()
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, AprilError)
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize(
    "right",
    [
        {"over_provisioning": 1.0, "max_staleness": 0},
        {"over_provisioning": 6.0},
        {"over_provisioning": 50.0, "max_staleness": None},
        {"over_provisioning": 50.0, "max_staleness": 1, "staleness_policy": "ignore"},
        {"stream_interval": 1},
    ],
)
def test_the_limits_themselves_are_allowed(right):
    args = APRILGRPOConfig("out", **CPU, **right)
    assert {name: getattr(args, name) for name in right} == right


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("2.5", 2.5), ("3", 3.0), ("1e0", 1.0)])
def test_a_factor_on_the_command_line_is_a_number_or_auto(parser, text, value):
    words = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false", "--over_provisioning", text]
    (args,) = parser(APRILGRPOConfig).parse_args_into_dataclasses(words)
    assert args.over_provisioning == value
    assert type(args.over_provisioning) is type(value)


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("'auto'", "auto"), ("2.5", 2.5), ("3", 3.0), ("'3'", 3.0)]
)
def test_a_factor_in_yaml_is_a_number_or_auto(tmp_path, text, value):
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: out\nuse_cpu: true\nbf16: false\nover_provisioning: {text}\n")
    (of_trl,) = TrlParser(APRILGRPOConfig).parse_args_and_config(["--config", str(path)])
    (of_transformers,) = HfArgumentParser(APRILGRPOConfig).parse_yaml_file(path)
    for args in (of_trl, of_transformers):
        assert args.over_provisioning == value
        assert type(args.over_provisioning) is type(value)


def test_auto_needs_no_room_under_the_bound():
    """It keeps to whatever bound there is; 2.0 does not fit under this one."""
    assert AprilOptions(over_provisioning="auto", max_staleness=0).over_provisioning == "auto"


@pytest.mark.parametrize(
    ("options", "start", "steps"),
    [
        ({}, 2.0, 1),
        ({"max_staleness": None}, 2.0, 1),
        ({"max_staleness": 0}, 1.0, 1),
        ({"max_staleness": 3}, 1.0, 4),
        ({"max_staleness": 5}, 2.0, 4),
        ({"max_staleness": 3, "staleness_policy": "mask"}, 1.0, 4),
    ],
)
def test_auto_starts_within_the_bound(options, start, steps, caplog):
    """Without a word about it, since nobody has asked for a factor that would have to be lowered, unless nothing is
    left to choose because of the updates of a batch.
    """
    args = APRILGRPOConfig(
        "out", **CPU, over_provisioning="auto", num_generations=4, per_device_train_batch_size=4,
        gradient_accumulation_steps=1, steps_per_generation=steps, **options,
    )  # fmt: skip
    pool = make_pool(args, AprilOptions.of(args))
    assert pool.over_provisioning == start
    if start > 1 or steps == 1:
        assert not caplog.records
    else:
        assert "'auto' and stays 1, which is synchronous" in caplog.text
        assert "Set max_staleness to 4 or more for a factor of 2" in caplog.text


def test_trls_own_checks_still_run():
    with pytest.raises(ValueError, match="divisible by num_generations"):
        APRILGRPOConfig("out", **CPU, num_generations=3, per_device_train_batch_size=4)
