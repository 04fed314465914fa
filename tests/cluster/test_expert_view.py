"""What people, JSON and Ray's metrics are told of experts."""

from __future__ import annotations

import argparse
import json

from cluster.commands.experts import add_experts
from cluster.expert_history import KEPT, ExpertHistory
from cluster.expert_messages import ExpertBalance, ExpertDecision, GroupBalance
from cluster.expert_placement import first_placement
from cluster.expert_samples import EXPERT_METRICS, expert_samples
from cluster.expert_tables import packed_counts, table_of
from cluster.expert_view import as_json, in_words, render

GIVEN = ExpertDecision(
    at=0.0,
    outcome="given",
    version=3,
    why="it will save 0.2 s a window and moves 38 MB to one rank",
    before=(1.5, 1.3),
    after=(1.1, 1.2),
    moved=(2, 1),
)
ARRIVED = ExpertDecision(at=2.0, outcome="arrived", version=3, why="", seconds=1.5, stall_s=0.004)
GROUP = GroupBalance(
    group="decode-0",
    version=3,
    given=None,
    table=table_of(first_placement(2, 4, 2, 3)),
    loads=packed_counts([[5, 6, 7, 8], [0, 0, 9, 1]], 10),
    imbalance=(1.1, 1.2),
    windows=5,
    steps=7,
    doing="its window is not full",
    preparing="",
    decisions=(GIVEN, ARRIVED),
)


def test_a_group_is_shown_with_its_copies_decisions_and_layers() -> None:
    lines = render(ExpertBalance(groups=(GROUP,))).splitlines()
    assert lines[0] == "decode-0  version 3: its window is not full"
    assert lines[1] == ("  2 layers of 4 experts in 2 x 3 slots; copies: 4 with 2, 4 with 1")
    assert "newest: 1.150, worst layer 1.200" in lines[2]
    assert "version 3 given, 3 slots moved, 1.400 -> 1.150: it will save" in lines[3]
    assert "stood still for at most 4.0 ms" in lines[4]
    assert lines[-2:] == [
        "        0   1.500   1.100      2",
        "        1   1.300   1.200      1",
    ]


def test_a_group_on_its_way_says_what_it_does() -> None:
    moving = GROUP.model_copy(update={"given": 4, "preparing": "version 4: 3 of 9 experts"})
    first = render(ExpertBalance(groups=(moving,))).splitlines()[0]
    assert first == "decode-0  version 3, version 4 on its way: version 4: 3 of 9 experts"


def test_where_nothing_is_shared_that_is_said() -> None:
    assert render(ExpertBalance(groups=())).startswith("no group shares its experts")
    waiting = ExpertBalance(groups=(), waiting_for=("decode-1",))
    assert render(waiting) == "waiting for the first report of decode-1"


def test_every_outcome_has_its_words() -> None:
    told = {
        outcome: in_words(GIVEN.model_copy(update={"outcome": outcome}))
        for outcome in ("given", "kept", "arrived", "given_up")
    }
    assert len(set(told.values())) == 4
    assert told["kept"].startswith("version 3 kept at 1.400: ")


def test_json_has_every_slot_and_every_load() -> None:
    shown = json.loads(json.dumps(as_json(ExpertBalance(groups=(GROUP,)))))
    (group,) = shown["groups"]
    assert group["slots"] == first_placement(2, 4, 2, 3).slots.tolist()
    assert group["experts"] == 4
    assert group["loads"] == [[5, 6, 7, 8], [0, 0, 9, 1]]
    assert group["decisions"][0]["before"] == [1.5, 1.3]
    assert "table" not in group


def test_the_command_has_a_name_and_a_line_of_help() -> None:
    parser = argparse.ArgumentParser()
    add_experts(parser.add_subparsers(metavar="COMMAND"))
    assert parser.parse_args(["experts", "--json"]).json
    assert "placements of experts" in parser.format_help()


def test_totals_grow_and_the_last_decisions_are_kept() -> None:
    history = ExpertHistory()
    for _ in range(KEPT):
        history.note("decode-0", GIVEN)
    history.note("decode-0", ARRIVED, moved_bytes=100)
    history.note("prefill-0", GIVEN.model_copy(update={"outcome": "kept"}))
    assert len(history.of("decode-0")) == KEPT
    assert history.of("decode-0")[-1] == ARRIVED

    told = {
        (one.metric.name, *one.labels): one.value
        for one in expert_samples({"decode": 1.25}, history)
    }
    assert told["tandem_expert_imbalance", "decode"] == 1.25
    assert ("tandem_expert_imbalance", "prefill") not in told
    assert told["tandem_expert_rebalances", "decode", "arrived"] == 1
    assert told["tandem_expert_rebalances", "prefill", "kept"] == 1
    assert told["tandem_expert_bytes", "decode"] == 100
    assert told["tandem_expert_switch_seconds", "decode"] == 0.004
    assert {metric.name for metric in EXPERT_METRICS} == {name for name, *_ in told}

    history.keep_only({"prefill-0"})
    assert history.of("decode-0") == ()
    assert history.moved_bytes["decode"] == 100  # a counter does not go back
