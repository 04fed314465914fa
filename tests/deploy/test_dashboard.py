"""deploy/grafana/tandem.json: every panel asks for metrics that exist, by labels they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster.expert_samples import EXPERT_METRICS
from cluster.metric_samples import METRICS, shown_name
from cluster.metrics import Metrics
from cluster.timeline import Timeline

ALL = METRICS + EXPERT_METRICS
BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "tandem.json"
NAME = re.compile(r"\b(?:ray_)?tandem_[a-z_]+")
GROUPING = re.compile(r"by \(([a-z, ]+)\) \((?:rate\()?([a-z_]+)")


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BOARD.read_text(encoding="utf-8"))
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in board()["panels"] for target in panel["targets"]]


def known() -> dict[str, set[str]]:
    """Labels by name, of the HTTP server's metrics and of those that go through Ray."""
    metrics = Metrics(lambda: 0)
    metrics.ended("/v1/completions", "ok")
    timeline = Timeline()
    timeline.record("started", queued_s=0.0)
    timeline.record("handed_over", bytes=1, push_s=0.0, tail_s=0.0, path="nixl/UCX")
    metrics.happened(timeline)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found | {shown_name(metric): set(metric.labels) for metric in ALL}


def test_every_metric_that_is_asked_for_exists() -> None:
    names = known()
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert asked
    assert not asked - names.keys()


def test_every_label_that_is_grouped_by_exists() -> None:
    names, seen = known(), 0
    for expression in expressions():
        for labels, name in GROUPING.findall(expression):
            seen += 1
            assert set(labels.split(", ")) <= names[name], expression
    assert seen > 10


def test_every_metric_of_the_ranks_is_shown() -> None:
    asked = " ".join(expressions())
    assert not [metric.name for metric in ALL if shown_name(metric) not in asked]


def test_panels_are_whole_and_do_not_overlap() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list("ABC")[
            : len(panel["targets"])
        ]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells


def test_counters_are_asked_for_as_rates_and_parentheses_close() -> None:
    counters = {shown_name(metric) for metric in ALL if metric.kind == "counter"}
    for expression in expressions():
        assert expression.count("(") == expression.count(")")
        for name in NAME.findall(expression):
            if name in counters and name != "ray_tandem_rank_starts_total":
                assert f"rate({name}[$__rate_interval])" in expression
