"""How a rank's steps are run follows from its model, its pool and its group, and is said."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.config import EngineSection
from cluster.grammars import Grammars
from engine.step_runners import StepRunners, step_runners
from kv_transfer.layout import Layout
from kv_transfer.slab import Slab
from model.state import state_fields
from tests.engine.packed_engine import small_model
from tests.model.running import float64
from tests.tiny import MODEL, StateModel


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


def runners(model: Any, *, answers: bool = True, alone: bool = True, **sizes: Any) -> StepRunners:
    return step_runners(
        "decode-0/0",
        model,
        Slab(Layout(state_fields(model.spec), 16), 8, 2),
        EngineSection(max_length=64, num_slots=2, **sizes),
        answers=answers,
        alone=alone,
        spelled_ids=None,
        grammars=Grammars(str(MODEL)),
        keep=0,
        encode=None,
        team=None,
    )


def test_a_model_over_a_cache_has_no_steps_apart() -> None:
    made = runners(StateModel())
    assert made.steps is None
    made.prepare()
    assert made.status()["launched"] == 0


def test_a_prefill_rank_has_none_either_and_nothing_to_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert runners(small_model(), answers=False).steps is None
    assert not caplog.messages


def test_a_group_that_shares_experts_makes_every_step_together_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        made = runners(small_model(), alone=False)
    assert made.steps is None
    (said,) = caplog.messages
    assert said.startswith("decode-0/0: no graphs and no steps ahead: its experts are with other")


def test_without_graphs_it_is_said_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = runners(small_model())
        off = runners(small_model(), graphs="off", run_ahead=False)
    assert made.steps is not None
    assert made.steps.may_run_ahead
    assert off.steps is not None
    assert not off.steps.may_run_ahead
    device, setting = caplog.messages
    assert device.endswith("not replayed as graphs: cpu has none")
    assert setting.endswith("not replayed as graphs: engine.graphs is off")


def test_tables_out_of_reach_keep_steps_from_running_ahead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        made = runners(small_model(on_device=False))
    assert made.steps is not None
    assert not made.steps.may_run_ahead
    assert "no steps ahead: Engram's tables are out of the GPU's reach" in caplog.messages[-1]
