"""APRIL's options: defaults, command line and YAML, and refused values."""

import dataclasses
import math

import pytest
import torch
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from trl_april.bridge.construction import trl_options
from trl_april.config import APRILGRPOConfig, AprilOptions
from trl_april.errors import ConfigError


CPU = {"use_cpu": True, "bf16": False}
OWN = {
    "over_provisioning": 1.5,
    "max_staleness": 3,
    "staleness_policy": "ignore",
    "dppo_threshold": 0.15,
    "resume_kv": "reuse",
    "overlap_generation": True,
    "dynamic_sampling": True,
    "score_during_generation": True,
    "max_rejected_groups_per_round": 40,
    "weight_sync": "filesystem",
    "weight_sync_dir": "/some/where",
    "stream_interval": 32,
    "save_on_signal": True,
    "tool_timeout": 30.0,
    "replay_environments": True,
}


def test_the_fields_and_the_defaults_that_differ_from_trls():
    """docs/api.md has the defaults of our own, and test_docs.py compares them."""
    ours = {field.name: field for field in dataclasses.fields(APRILGRPOConfig)}
    trls = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    assert ours.keys() - trls.keys() == set(OWN)
    changed = {
        name: ours[name].default
        for name, field in trls.items()
        if (field.default, field.default_factory) != (ours[name].default, ours[name].default_factory)
    }
    assert changed == dict.fromkeys(("use_vllm", "vllm_mode", "vllm_importance_sampling_mode"))


@pytest.mark.parametrize(
    ("given", "april", "stock"),
    [
        ({}, (True, "colocate", "token_truncate"), (False, "colocate", "sequence_mask")),
        ({"vllm_mode": "server"}, (True, "server", "token_truncate"), (True, "server", "sequence_mask")),
        ({"vllm_server_port": 1}, (True, "server", "token_truncate"), (True, "server", "sequence_mask")),
        ({"use_vllm": True}, (True, "colocate", "token_truncate"), (True, "colocate", "sequence_mask")),
        (
            {"use_vllm": False, "vllm_importance_sampling_mode": "token_mask"},
            (False, "colocate", "token_mask"),
            (False, "colocate", "token_mask"),
        ),
    ],
)
def test_options_that_are_not_set_are_trls_where_april_is_off(given, april, stock):
    args = APRILGRPOConfig("out", **CPU, **given)
    for is_on, expected in ((True, april), (False, stock)):
        names = ("use_vllm", "vllm_mode", "vllm_importance_sampling_mode")
        values = {**{name: getattr(args, name) for name in names}, **trl_options(args, april_enabled=is_on)}
        assert tuple(values.values()) == expected


@pytest.mark.parametrize(("has_gpu", "options", "bf16"), [
    (False, {}, False), (True, {}, True), (False, {"use_cpu": True}, True), (True, {"bf16": False}, False)
])  # fmt: skip
def test_precision_is_trls_where_that_is_no_error(has_gpu, options, bf16, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: has_gpu)
    assert APRILGRPOConfig("out", **options).bf16 is bf16


def test_every_field_is_documented(capsys):
    for name in (*OWN, "use_vllm", "vllm_mode", "vllm_importance_sampling_mode"):
        help_text = APRILGRPOConfig.__dataclass_fields__[name].metadata["help"]
        assert help_text.endswith(".") and name in APRILGRPOConfig.__doc__
    with pytest.raises(SystemExit) as ended:  # argparse formats the texts
        TrlParser(APRILGRPOConfig).parse_args_into_dataclasses(["--help"])
    assert ended.value.code == 0 and "--over_provisioning" in capsys.readouterr().out


def test_options_come_from_the_config_or_are_the_defaults():
    assert dataclasses.asdict(AprilOptions.of(APRILGRPOConfig("out", **CPU, **OWN))) == OWN
    for config_class in (APRILGRPOConfig, GRPOConfig):
        assert AprilOptions.of(config_class("out", **CPU)) == AprilOptions()
        assert AprilOptions.resolved(config_class("out", **CPU)).save_on_signal
        assert not AprilOptions.resolved(config_class("out", save_strategy="no", **CPU)).save_on_signal


@pytest.mark.parametrize(
    ("given", "overlaps", "kv"),
    [
        ({}, True, "keep"),
        ({"overlap_generation": "false"}, False, "reuse"),
        ({"over_provisioning": 1.0}, False, "reuse"),  # synchronous
        ({"max_staleness": 0, "over_provisioning": "auto"}, False, "reuse"),
        ({"max_staleness": 0}, False, "reuse"),  # the default factor is then 1.0
        ({"max_staleness": None}, True, "keep"),
        ({"over_provisioning": 1.0, "overlap_generation": True, "resume_kv": "recompute"}, True, "recompute"),
    ],
)
def test_the_schedule_overlaps_unless_training_is_to_be_synchronous(given, overlaps, kv):
    chosen = AprilOptions(**given).with_schedule()
    assert (chosen.overlap_generation, chosen.resume_kv) == (overlaps, kv)


COMMAND_LINE = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_the_command_line(parser):
    options = [text for name, value in OWN.items() for text in (f"--{name}", str(value))]
    (args,) = parser(APRILGRPOConfig).parse_args_into_dataclasses(
        [*COMMAND_LINE, *options, "--num_generations", "4", "--use_vllm", "false"]
    )
    assert dataclasses.asdict(AprilOptions.of(args)) == OWN
    assert (args.num_generations, args.use_vllm, args.vllm_mode) == (4, False, None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"over_provisioning": 0.5}, "over_provisioning is 0.5.*at least 1.0.*1.0 is synchronous"),
        ({"over_provisioning": math.nan}, "over_provisioning is nan.*finite"),
        ({"over_provisioning": math.inf, "max_staleness": None}, "over_provisioning is inf.*finite"),
        ({"over_provisioning": 4.5, "max_staleness": 3}, "4.5.*max_staleness=3.*at most 4.*Lower it, or raise"),
        ({"over_provisioning": "fast"}, "over_provisioning is 'fast'.*at least 1.0.*'auto'"),
        ({"over_provisioning": True}, "over_provisioning is True.*a number"),
        ({"max_staleness": -1}, "max_staleness is -1.*None"),
        ({"staleness_policy": "drop"}, "staleness_policy is 'drop'.*wait, mask, ignore"),
        ({"weight_sync": "ftp"}, "weight_sync is 'ftp'.*auto, adapter, nccl, ipc, filesystem"),
        ({"resume_kv": "kept"}, "resume_kv is 'kept'.*auto, recompute, reuse, keep"),
        ({"resume_kv": "keep", "overlap_generation": False}, "Set overlap_generation=True"),
        ({"overlap_generation": "maybe"}, "overlap_generation is 'maybe'.*True, False or 'auto'"),
        ({"stream_interval": 0}, "stream_interval is 0.*at least 1"),
        ({"tool_timeout": 0.0}, "tool_timeout is 0.0.*Omit it"),
    ],
)
def test_refused_values_are_named_with_rule_and_remedy(wrong, words):
    for make in (lambda: APRILGRPOConfig("out", **CPU, **wrong), lambda: AprilOptions(**wrong)):
        with pytest.raises(ConfigError, match=words):
            make()


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("'auto'", "auto"), ("2.5", 2.5), ("'3'", 3.0)])
def test_a_factor_in_text_is_a_number_or_auto(tmp_path, text, value):
    """In YAML and on the command line."""
    path = tmp_path / "config.yaml"
    yaml = "output_dir: out\nuse_cpu: true\nbf16: false\nmax_staleness: null\n"
    path.write_text(f"{yaml}over_provisioning: {text}\n")
    words = [*COMMAND_LINE, "--over_provisioning", text.strip("'")]
    found = [
        *TrlParser(APRILGRPOConfig).parse_args_and_config(["--config", str(path)]),
        *HfArgumentParser(APRILGRPOConfig).parse_yaml_file(path),
        *TrlParser(APRILGRPOConfig).parse_args_into_dataclasses(words),
        *HfArgumentParser(APRILGRPOConfig).parse_args_into_dataclasses(words),
    ]
    assert [args.over_provisioning for args in found] == [value] * 4
    assert {type(args.over_provisioning) for args in found} == {type(value)}


@pytest.mark.parametrize(
    ("options", "factor", "with_tools"),
    [
        ({"max_staleness": 4}, 3.0, 5.0),
        ({"max_staleness": 1}, 2.0, 2.0),
        ({"max_staleness": 0, "staleness_policy": "mask"}, 3.0, 6.0),
        ({"over_provisioning": 2.5}, 2.5, 2.5),
    ],
)
def test_the_default_factor_is_what_the_bound_allows_and_higher_with_tools(options, factor, with_tools):
    options = AprilOptions(**options)
    assert options.with_schedule().over_provisioning == factor
    assert options.with_schedule(acts=True).over_provisioning == with_tools


@pytest.mark.parametrize(
    ("options", "start", "steps"),
    [
        ({"max_staleness": None}, 3.0, 1),
        ({"max_staleness": 0}, 1.0, 1),
        ({"max_staleness": 5}, 2.0, 4),
        ({"max_staleness": 3, "staleness_policy": "mask"}, 1.0, 4),
        ({"over_provisioning": 3.0, "max_staleness": 5}, 2.0, 4),
        ({"over_provisioning": 3.0, "staleness_policy": "ignore"}, 3.0, 4),
    ],
)
def test_the_factor_is_lowered_to_the_bound(options, start, steps, caplog):
    """With a warning, unless "auto" still has a choice. `steps` optimizer steps train a batch."""
    assert AprilOptions(**{"over_provisioning": "auto", **options}).bounded_factor(steps) == start
    if options == {"over_provisioning": 3.0, "max_staleness": 5}:
        assert "over_provisioning is lowered from 3.0 to 2: " in caplog.text
    elif start > 1 or steps == 1:
        assert not caplog.records
    else:
        assert "'auto' and stays 1, which is synchronous" in caplog.text
        assert "Set max_staleness to 8 or more for a factor of 3" in caplog.text
