"""Options are declared once; parsers, configuration files and processes' arguments follow from the declaration."""
import dataclasses
import json

import pytest

import allspark_server.__main__ as rank
import allspark_server.http.__main__ as worker
from allspark_launch.cli import build_parser
from allspark_launch.group.http_server import HttpOptions
from allspark_launch.options import RELOADABLE, GroupOptions, ModelOptions, ServeOptions, group_options
from allspark_server.options import (
    EVERY_RANK,
    FIRST_RANK,
    RankOptions,
    WorkerOptions,
    options_of,
    rank_words,
    worker_words,
)


def other_value(declared):
    """A value other than the default."""
    if declared.choices:
        return next(choice for choice in declared.choices if choice != declared.effective_default)
    return {"str": "text", "int": 3, "bool": True, "float": 2.5, "list[str]": ["a", "b"], "list[int]": [2, 5],
            "list[dict | str]": ["model", {"model_name": "m", "model_path": "/m"}]}[declared.kind]


def test_ranks_take_every_option_that_is_theirs():
    values = RankOptions(**{declared.name: other_value(declared) for declared in options_of(RankOptions)})
    parsed = rank.parser().parse_args([*rank_words(values, FIRST_RANK), *rank_words(values, EVERY_RANK)])
    models = [text for text in parsed.models if text == "model"] + [rank.model_config(parsed.models[1]).model_name]
    assert models == ["model", "m"]
    for declared in options_of(RankOptions):
        if declared.name != "models":
            assert getattr(parsed, declared.name) == getattr(values, declared.name), declared.name
    default = rank.parser().parse_args([])
    assert rank_words(RankOptions(), FIRST_RANK) == rank_words(RankOptions(), EVERY_RANK) == []
    assert (default.max_message_mib, default.tls_role, default.log_level) == (16, "admin", "info")


def test_http_workers_take_every_option_that_is_theirs():
    values = WorkerOptions(**{declared.name: other_value(declared) for declared in options_of(WorkerOptions)})
    parsed = worker.parser().parse_args(["--fd", "3", *worker_words(values)])
    passed = [declared for declared in options_of(WorkerOptions) if declared.worker]
    assert len(passed) > 8
    for declared in passed:
        assert getattr(parsed, declared.name) == getattr(values, declared.name), declared.name


def test_a_flag_is_what_the_key_is(tmp_path):
    """Each option of a group, as a flag and as a key of the configuration file."""
    for declared in options_of(GroupOptions):
        if declared.name in ("models", "http_workers"):
            continue
        value = other_value(declared)
        by_flag = group_options(build_parser().parse_args(["serve", *declared.words(value)]))
        path = tmp_path / f"{declared.name}.json"
        path.write_text(json.dumps({declared.name: value}))
        by_key = group_options(build_parser().parse_args(["serve", "--config", str(path)]))
        assert by_flag == by_key == dataclasses.replace(GroupOptions(), **{declared.name: value}), declared.name


def test_what_is_checked_names_the_flag_or_the_line(tmp_path):
    with pytest.raises(ValueError, match=r"^--drain-limit: drain_limit is -1.0; it must be a number of seconds"):
        group_options(build_parser().parse_args(["serve", "--drain-limit", "-1"]))
    path = tmp_path / "group.toml"
    path.write_text('ranks = 2\nlog_level = "loud"\n')
    with pytest.raises(ValueError, match="line 2: log_level is 'loud'; allowed: debug, info, warning, error"):
        GroupOptions.from_file(str(path))


def test_the_reference_has_every_flag_of_serve():
    rows = [(option, declared is GroupOptions) for declared in (ServeOptions, GroupOptions, ModelOptions)
            for option in options_of(declared) if option.help]
    flags = {flag for option, _ in rows for flag in (option.flag, *option.aliases)}
    actions = build_parser()._subparsers._group_actions[0].choices["serve"]._actions
    hidden = {"-h", "--help", "--progress-lines", "--report-file"}
    assert flags == {flag for action in actions for flag in action.option_strings} - hidden
    assert {option.name for option, is_key in rows if is_key} == {f.name for f in dataclasses.fields(GroupOptions)}
    assert {option.name for option, _ in rows if option.reloadable} == set(RELOADABLE) == {"drain_limit", "log_level"}


def test_http_options_of_a_group_are_those_it_shares():
    group = GroupOptions(http="127.0.0.1:0", http_workers=2, token_file="keys", log_level="debug", max_message_mib=4)
    assert group.http_options("unix:/inner") == HttpOptions(
        address="127.0.0.1:0", workers=2, token_file="keys", pool=["unix:/inner"], pool_token_file="keys",
        log_level="debug", max_body_mib=4)


def test_model_flags_set_fields_of_the_configuration():
    parsed = build_parser().parse_args(["run", "--max-length", "64", "--set", "num_threads=2", "--weight-dtype",
                                        "int8"])
    assert ModelOptions.fields_of(parsed) == {"engine_max_length": 64, "weight_dtype": "int8", "num_threads": 2}


# Every key of the configuration file of version 0.1.0, and the members that its pools have written.
LAST_FILE = """
models = ["org/name", {model_name = "m", model_path = "/m", engine_max_length = 4096, weight_dtype = "int8"}]
address = "127.0.0.1:50051"
ranks = 2
numa_nodes = [0, 1]
memory_nodes = [4]
gpus = [0]
hosts = "a,b"
remote_shell = "ssh -p 22"
cpus_per_rank = 3
use_siblings = true
strict = true
token_file = "/t"
tls_cert = "/c"
tls_key = "/k"
tls_ca = "/a"
tls_role = "read"
insecure = true
socket_mode = "0660"
socket_group = "g"
model_root = "/r"
max_message_mib = 8
max_requests = 9
max_tenant_requests = 4
state_file = "/s"
drain_limit = inf
log_level = "debug"
log_format = "json"
log_requests = true
http = "127.0.0.1:8000"
http_workers = 2
"""


def test_the_configuration_of_the_last_version_is_read(tmp_path):
    file = tmp_path / "group.toml"
    file.write_text(LAST_FILE)
    group = GroupOptions.from_file(str(file))
    assert (group.address, group.model_root, group.drain_limit) == (["127.0.0.1:50051"], ["/r"], float("inf"))
    assert len(group.models) == 2 and group.numa_nodes == [0, 1] and group.http_workers == 2
    file.write_text("from_the_future = 1\nranks = 2\n")
    with pytest.raises(ValueError, match=r"group.toml, line 1: unknown key 'from_the_future'; known: "):
        GroupOptions.from_file(str(file))
