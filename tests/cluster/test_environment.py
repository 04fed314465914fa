"""Environment variables: DeepInfer's rules of reading, ours over its, and names nobody reads."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig, load_config, setting_names
from cluster.environment import remarks, setting_of, variable_of
from cluster.environment_command import HIDDEN, add_env, rows, setting_rows
from cluster.environment_table import BY_NAME, TABLE, Variable
from cluster.errors import StartupError

ROOT = Path(__file__).parents[2]
READ = re.compile(r"environ(?:\.get\(|\[)\s*\"([A-Z_]+)\"|\"([A-Z_]+)\" (?:not )?in os\.environ")
FOLDERS = "cluster offline engine kernels kv_transfer model prefill_worker decode_worker examples"


@pytest.mark.parametrize(
    ("text", "value"),
    [("", False), ("0", False), ("false", False), ("False", False)]
    + [("1", True), ("no", True), ("off", True), ("FALSE", True), (" ", True)],
)
def test_only_four_texts_are_false(text: str, value: bool) -> None:
    assert Variable("DEEPINFER_X", "", kind="bool").parse(text) is value


def test_numbers_are_those_of_python_and_an_error_begins_with_the_name() -> None:
    assert Variable("DEEPINFER_X", "", kind="int").parse(" 1_000 ") == 1000
    assert Variable("DEEPINFER_X", "", kind="float").parse("1e-3") == 0.001
    with pytest.raises(StartupError, match=r"^DEEPINFER_X: "):
        Variable("DEEPINFER_X", "", kind="int").parse("1.5")


def test_a_choice_lists_what_it_may_be() -> None:
    with pytest.raises(StartupError, match=r"^DEEPINFER_ACCELERATOR: 'tpu' is none of auto, cpu"):
        load_config(None, (), {"DEEPINFER_ACCELERATOR": "tpu"})


def test_the_accelerator_reaches_both_pools_and_the_cpu_frees_their_gpus() -> None:
    nvidia = load_config(None, ["decode.gpus=1"], {"DEEPINFER_ACCELERATOR": "nvidia"})
    assert (nvidia.prefill.accelerator, nvidia.decode.accelerator) == ("nvidia", "nvidia")
    assert nvidia.decode.gpus == 1
    config = ROOT / "deploy" / "configs" / "one_node.toml"
    assert load_config(config, (), {}).decode.gpus == 1
    cpu = load_config(config, (), {"DEEPINFER_ACCELERATOR": "cpu"})
    assert (cpu.decode.accelerator, cpu.prefill.gpus, cpu.decode.gpus) == ("cpu", 0, 0)


def test_a_checkpoint_of_deepinfer_is_served_with_its_weights() -> None:
    config = load_config(None, (), {"DEEPINFER_HF_MODEL_DIR": "/models/flash"})
    assert (config.model.path, config.model.weights) == ("/models/flash", "checkpoint")


def test_a_variable_overrules_the_file_and_a_flag_overrules_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[http]\nport = 1\n[model]\npath = "in-file"\n')
    environ = {"TANDEM_HTTP__PORT": "2", "TANDEM_PREFILL__ENGINE__NUM_BLOCKS": "7"}
    assert load_config(file, (), {}).http.port == 1
    config = load_config(file, (), environ)
    assert (config.http.port, config.prefill.engine.num_blocks) == (2, 7)
    assert load_config(file, ["http.port=3"], environ).http.port == 3
    both = {"DEEPINFER_HF_MODEL_DIR": "engine's", "TANDEM_MODEL__PATH": "own"}
    assert load_config(file, (), both).model.path == "own"


def test_values_are_toml_or_bare_words() -> None:
    environ = {"TANDEM_HTTP__HOST": "0.0.0.0", "TANDEM_MODEL__SERVED_NAME": '"8"'}
    config = load_config(None, (), environ)
    assert (config.http.host, config.model.served_name) == ("0.0.0.0", "8")


def test_a_setting_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(StartupError, match=r"TANDEM_HTTP__PROT: .*did you mean TANDEM_HTTP__PORT"):
        load_config(None, (), {"TANDEM_HTTP__PROT": "9"})


def test_names_and_settings_are_each_others_inverse() -> None:
    for setting in setting_names():
        assert setting_of(variable_of(setting)) == setting


def test_every_setting_that_the_table_names_exists() -> None:
    for variable in TABLE:
        for chosen in (variable.sets or {}).values():
            assert set(chosen) <= set(setting_names()), variable.name


def test_no_name_stands_twice_and_unused_ones_set_nothing() -> None:
    assert len(BY_NAME) == len(TABLE)
    assert not [one.name for one in TABLE if one.unused and one.sets]


def leaves(tree: Mapping[str, Any], below: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        found += leaves(value, f"{below}{key}.") if isinstance(value, Mapping) else [below + key]
    return found


def test_setting_names_are_the_leaves_of_the_tree() -> None:
    assert list(setting_names()) == leaves(ClusterConfig().model_dump())


def test_deepinfers_switches_of_the_decode_loop_are_obeyed() -> None:
    engine = load_config(None, environ={}).decode.engine
    assert (engine.graphs, engine.run_ahead, engine.graph_interval) == ("auto", True, 8)
    environ = {
        "DEEPINFER_ENFORCE_EAGER": "1",
        "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "0",
        "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL": "4",
    }
    engine = load_config(None, environ=environ).decode.engine
    assert (engine.graphs, engine.run_ahead, engine.graph_interval) == ("off", False, 4)
    engine = load_config(None, environ={"DEEPINFER_ENFORCE_EAGER": "0"}).decode.engine
    assert engine.graphs == "auto"


def test_what_has_no_effect_is_told() -> None:
    environ = {
        "DEEPINFER_ENABLE_MTP_VARLEN": "1",
        "DEEPINFER_USE_NEXTN_DECODE": "3",
        "DEEPINFER_ACCELERATR": "cpu",
        "TANDEM_HTTP_PORT": "9",
        "TANDEM_URL": "http://elsewhere",
        "HOME": "/",
    }
    accelerator, unused, measured, port = remarks(environ, setting_names())
    assert accelerator.endswith("did you mean DEEPINFER_ACCELERATOR?")
    assert unused.startswith("DEEPINFER_ENABLE_MTP_VARLEN: not used by this version: ")
    assert measured.startswith("DEEPINFER_USE_NEXTN_DECODE: only examples/benchmark.py reads it: ")
    assert port.endswith("did you mean TANDEM_HTTP__PORT?")


def test_a_wrong_value_of_an_unused_variable_is_told_too() -> None:
    environ = {"DEEPINFER_USE_NEXTN_DECODE": "five", "DEEPINFER_NUM_STATE_SLOTS_RATIO": "1.2"}
    found = remarks(environ, setting_names())
    assert [one.partition(":")[0] for one in found] == [
        "DEEPINFER_NUM_STATE_SLOTS_RATIO",
        "DEEPINFER_USE_NEXTN_DECODE",
        "DEEPINFER_USE_NEXTN_DECODE",
    ]
    assert "invalid literal for int()" in found[-1]


def test_services_that_kubernetes_tells_of_are_no_variables_of_ours() -> None:
    environ = {
        "TANDEM_HEAD_SVC_SERVICE_HOST": "10.0.0.1",
        "TANDEM_HEAD_SVC_PORT_8100_TCP_ADDR": "10.0.0.1",
        "TANDEM_HEAD_SVC_PORT": "tcp://10.0.0.1:8100",
    }
    assert remarks(environ, setting_names()) == []
    assert load_config(None, (), environ) == load_config(None, (), {})
    del environ["TANDEM_HEAD_SVC_SERVICE_HOST"]
    assert len(remarks(environ, setting_names())) == 2


def test_every_variable_that_the_code_reads_is_in_the_table() -> None:
    read = set()
    for folder in FOLDERS.split():
        for path in (ROOT / folder).rglob("*.py"):
            found = READ.findall(path.read_text(encoding="utf-8"))
            read |= {one or other for one, other in found}
    assert {"TANDEM_URL", "RAY_ADDRESS", "XDG_STATE_HOME"} <= read  # so the pattern finds them
    assert not read - set(BY_NAME) - {"PATH", "HOME", "PYTHONPATH"}


def test_rows_say_where_a_value_comes_from_and_hide_keys() -> None:
    environ = {"TANDEM_API_KEY": "hush", "TANDEM_HTTP__PORT": "9"}
    by_name = {row.name: row for row in rows(environ, everything=False)}
    assert by_name["TANDEM_API_KEY"].value == HIDDEN
    assert by_name["TANDEM_URL"].value is None
    (port,) = setting_rows(environ, None, everything=False)
    assert (port.value, port.source, port.meaning) == ("9", "environment", "http.port")
    config = str(ROOT / "deploy" / "configs" / "one_node.toml")
    sources = {row.meaning: row.source for row in setting_rows(environ, config, everything=True)}
    assert sources["http.port"] == "environment"
    assert sources["decode.gpus"] == "file"
    assert sources["name"] == "default"


def test_the_command_prints_a_table_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    add_env(parser.add_subparsers())
    monkeypatch.setenv("DEEPINFER_GLOO_TIMEOUT", "1")
    options = parser.parse_args(["env"])
    assert options.run(options) == 0
    told = capsys.readouterr().out
    assert "warning: DEEPINFER_GLOO_TIMEOUT: not used by this version" in told
    assert "DEEPINFER_ACCELERATOR" in told
    options = parser.parse_args(["env", "--all", "--json"])
    assert options.run(options) == 0
    names = {row["name"] for row in json.loads(capsys.readouterr().out)["variables"]}
    assert names >= set(BY_NAME) | set(map(variable_of, setting_names()))


def test_a_misspelt_section_is_named_and_the_rest_is_told_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    add_env(parser.add_subparsers())
    monkeypatch.setenv("TANDEM_HTPP__PORT", "9")
    monkeypatch.setenv("TANDEM_HTTP__HOST", "0.0.0.0")
    options = parser.parse_args(["env"])
    assert options.run(options) == 1
    told = capsys.readouterr().out
    assert "TANDEM_HTTP__HOST" in told
    assert (
        "warning: TANDEM_HTPP__PORT: is no variable of ours; did you mean TANDEM_HTTP__PORT?"
        in (told)
    )
    assert told.endswith("a launch refuses TANDEM_HTPP__PORT\n")
    with pytest.raises(StartupError, match="TANDEM_HTPP__PORT"):
        load_config(None, (), {"TANDEM_HTPP__PORT": "9"})
