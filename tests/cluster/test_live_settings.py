"""What a changed setting costs: nothing, one deployment's restart, or everything's."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, get_args

import pytest

from cluster.config import ClusterConfig, parse_config, setting_names
from cluster.live_settings import (
    DEPLOYMENTS,
    HELD_BY,
    LIVE,
    changes,
    digest,
    is_live,
    restarted_for,
    take_over,
)

TREE: dict[str, dict[str, Any]] = {
    "autoscale": {"enabled": True},  # else its other settings do not count
    "prefill": {"ranks": 2},  # that can run prompts together
    "decode": {"ranks": 2},
    "router": {"colocated": True},
}
DEFAULT = parse_config(TREE)


def with_setting(name: str, value: Any) -> ClusterConfig:
    tree: dict[str, Any] = deepcopy(TREE)
    *sections, key = name.split(".")
    inner = tree
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    return parse_config(tree)


def another(name: str) -> ClusterConfig:
    """The default configuration with that one setting changed."""
    value: Any = DEFAULT
    choices: tuple[Any, ...] = ()
    for key in name.split("."):
        choices = get_args(type(value).model_fields[key].annotation)
        value = getattr(value, key)
    candidates: list[Any] = (
        [not value]
        if isinstance(value, bool)
        else [value + 1, value * 2, value / 2]
        if isinstance(value, int | float)
        else [one for one in choices or ("another",) if one != value]
    )
    for candidate in candidates:
        try:
            return with_setting(name, candidate)
        except Exception:
            continue
    raise AssertionError(f"no other value for {name}")


@pytest.mark.parametrize("name", setting_names())
def test_every_setting_is_live_or_has_somebody_who_restarts(name: str) -> None:
    changed = another(name)
    (change,) = changes(DEFAULT, changed)
    restarts = {one for one in DEPLOYMENTS if digest(DEFAULT, one) != digest(changed, one)}
    assert change.setting == name
    assert set(change.restarts) == restarts
    assert (take_over(DEFAULT, changed) == changed) == is_live(name)
    assert not (is_live(name) and restarts)


@pytest.mark.parametrize("name", [*LIVE, *HELD_BY])
def test_the_lists_name_only_settings_that_there_are(name: str) -> None:
    assert any(one == name or one.startswith(f"{name}.") for one in setting_names())


@pytest.mark.parametrize(
    ("name", "restarts"),
    [
        ("http.max_concurrent", ()),
        ("generation.recovery_wait_s", ()),
        ("router.colocated", ()),
        ("log.level", ()),
        ("decode.engine.max_waiting", ()),
        ("decode.groups", ()),
        ("http.port", ("Ingress",)),
        ("decode.engine.num_blocks", ("Decode",)),
        ("prefill.engine.max_length", ("Prefill", "Ingress")),
        ("model.seed", ("Ingress", "Prefill", "Decode")),
        ("wire.t_detect_s", DEPLOYMENTS),
        ("autoscale.decode.requests", DEPLOYMENTS),
        ("a_section_of_the_future.setting", DEPLOYMENTS),
    ],
)
def test_who_is_restarted(name: str, restarts: tuple[str, ...]) -> None:
    assert restarted_for(name) == restarts


def test_only_what_is_live_is_taken_over() -> None:
    wanted = parse_config({"http": {"port": 9000, "max_concurrent": 3}, "model": {"seed": 5}})
    taken = take_over(DEFAULT, wanted)
    assert (taken.http.max_concurrent, taken.http.port, taken.model.seed) == (3, 8100, 0)


def test_changes_are_told_in_a_line_each() -> None:
    wanted = parse_config(
        {
            "http": {"max_concurrent": 3, "proxy_port": 8000},
            "decode": {"groups": 2, "engine": {"num_blocks": 64}},
        }
    )
    assert [str(change) for change in changes(ClusterConfig(), wanted)] == [
        "decode.engine.num_blocks 512 -> 64: restarts Decode",
        "decode.groups 1 -> 2: scales",
        "http.max_concurrent 256 -> 3: live",
        "http.proxy_port 0 -> 8000: taken when Serve starts anew",
    ]
    assert changes(wanted, wanted) == []


def test_what_is_switched_off_restarts_nobody() -> None:
    wanted = parse_config({"autoscale": {"up_delay_s": 3.0}})
    assert changes(ClusterConfig(), wanted) == []
    assert digest(ClusterConfig(), "Decode") == digest(wanted, "Decode")
