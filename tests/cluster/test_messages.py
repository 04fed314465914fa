"""The codec: one example of each kind, and everything that is not a message."""

from __future__ import annotations

from typing import get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.codec import decode, encode
from cluster.errors import ERRORS, ClusterError, ProtocolError, WorkerLost, revive
from cluster.expert_messages import (
    ExpertCounts,
    ExpertDecision,
    ExpertSwitch,
    ExpertTable,
    GroupBalance,
)
from cluster.messages import (
    Accepted,
    AskExperts,
    AskPairs,
    Cancel,
    Cancelled,
    Commit,
    Connect,
    Connected,
    DrainingNow,
    ExpertBalance,
    ExpertPlacement,
    ExpertReport,
    Failed,
    Generate,
    Guard,
    HandedOver,
    Hello,
    Image,
    Member,
    Membership,
    NoRoomNow,
    NoWorkers,
    OpenPush,
    PairPath,
    Pairs,
    PieceDigest,
    Planned,
    Prefill,
    PromptLogprobs,
    Proof,
    Pushed,
    PushFailed,
    PushOpened,
    PushTo,
    RejectedNow,
    Report,
    Request,
    Reserve,
    Reserved,
    Route,
    Routed,
    Sampling,
    Segment,
    Span,
    Started,
    Stop,
    Suspect,
    TokenLogprobs,
    Tokens,
    Unpacked,
    Watch,
    WireMessage,
    pack_ids,
    unpack_ids,
)
from tests.cluster.fakes import LOAD, endpoint

REQUEST = Request(
    request_id="r1",
    prompt=pack_ids([1, 2, 3]),
    output=pack_ids([7]),
    sampling=Sampling(temperature=0.5, seed=2**63 - 1, max_tokens=9, stop_token_ids=(1, 2)),
    images=(Image(start=1, count=2, height=1, width=2, key=bytes(16), pixels=b"\x00\xff\x80" * 2),),
)
MEMBER = Member(endpoint=endpoint(), load=LOAD, draining=True)
TABLE = ExpertTable(layers=1, ranks=2, slots=2, experts=3, held=bytes(8))
SEGMENT = Segment(offset=4096, cell_bytes=1024, cells=4)

EXAMPLES: tuple[WireMessage, ...] = (
    Hello(version=1, role="caller", incarnation="i1", nonce=bytes(32)),
    Proof(mac=bytes(32)),
    Failed(error="NoRoom", message="full", retry_after_s=1.5),
    Route(request_id="r1", length=3, longest=12, avoid=("i1",), decode_only=True),
    Routed(prefill=None, decode=endpoint()),
    NoWorkers(message="none", retry_after_s=1.0),
    Report(member=MEMBER),
    Watch(),
    Suspect(incarnation="i1", why="silent for 5 s"),
    Guard(incarnations=("i1", "i2")),
    Membership(members=(MEMBER, MEMBER)),
    Prefill(request=REQUEST, attempt=1),
    Generate(request=REQUEST, attempt=2),
    Started(queued_s=0.25),
    Reserve(request=REQUEST, attempt=1),
    Reserved(reservation="i1:1", segment=SEGMENT),
    NoRoomNow(retry_after_s=0.5),
    DrainingNow(),
    PushTo(reservation="i1:1", segment=SEGMENT, decode=endpoint()),
    Tokens(
        first=1,
        token_ids=(5, 6),
        finish="stop",
        logprobs=(
            TokenLogprobs(logprob=-0.5, top=((5, -0.5), (9, -1.25))),
            TokenLogprobs(logprob=-2.0),
        ),
    ),
    PromptLogprobs(first=1, logprobs=(TokenLogprobs(logprob=-0.5, top=((5, -0.5),)),)),
    HandedOver(
        bytes_moved=1, pushes=2, push_s=0.1, tail_s=0.2, path="nixl/UCX", reservation="i1:1"
    ),
    PushFailed(reservation="i1:1", why="no route to decode-0/0"),
    Cancel(),
    Stop(index=7),
    Cancelled(reservation="i1:1"),
    Connect(wire_form="f", metadata=b"\x00\xff"),
    Connected(metadata=b"m", ring_bytes=4096, block_tokens=16, ring_slack=5, why_packed="far"),
    OpenPush(reservation="i1:1", length=100, direct=True),
    PushOpened(blocks=b"\x07\x00\x00\x00", slot=3),
    Planned(pushes=((Span(field="rows", layer=0, start=0, stop=8),),)),
    Pushed(seq=3, spans=(Span(field="rows", layer=0, start=0, stop=8),)),
    Unpacked(seq=3),
    Commit(
        length=100,
        first_token=7,
        pieces=(PieceDigest(field="rows", layer=0, start=0, stop=8, digest=2**64 - 1),),
    ),
    Accepted(),
    RejectedNow(why="digest"),
    AskPairs(),
    Pairs(
        pairs=(
            PairPath(
                decode="decode-0/0",
                path="nvlink/cuda_ipc",
                direct=True,
                latency_s=5e-5,
                gb_per_s=250.0,
                expected_gb_per_s=100.0,
            ),
            PairPath(decode="decode-1/0", path="nixl/UCX", direct=False, why="another host"),
        )
    ),
    ExpertReport(
        group="d0",
        index=1,
        version=2,
        table=TABLE,
        counts=ExpertCounts(layers=1, experts=3, steps=4, tokens=bytes(12)),
        preparing="version 3",
        switch=ExpertSwitch(fetch_s=0.5, stall_s=0.001, moved_bytes=9),
    ),
    ExpertPlacement(group="d0", version=3, table=TABLE),
    AskExperts(),
    ExpertBalance(
        groups=(
            GroupBalance(
                group="d0",
                version=2,
                given=3,
                table=TABLE,
                loads=ExpertCounts(layers=1, experts=3, steps=4, tokens=bytes(12)),
                imbalance=(1.25,),
                windows=1,
                steps=2,
                doing="version 3 is on its way",
                preparing="",
                decisions=(ExpertDecision(at=1.0, outcome="given", version=3, why="", moved=(2,)),),
            ),
        ),
        waiting_for=("d1",),
    ),
)
ids = [example.kind for example in EXAMPLES]


def test_there_is_one_example_of_each_kind() -> None:
    members = set(get_args(get_args(WireMessage)[0]))
    assert {type(example) for example in EXAMPLES} == members
    assert len(EXAMPLES) == len(members)
    assert len(set(ids)) == len(members), "two kinds have one name"


@pytest.mark.parametrize("message", EXAMPLES, ids=ids)
def test_a_message_comes_back_as_it_was(message: WireMessage) -> None:
    assert decode(encode(message)) == message
    assert hash(decode(encode(message))) == hash(message)


@pytest.mark.parametrize("message", EXAMPLES, ids=ids)
def test_every_truncation_is_refused(message: WireMessage) -> None:
    whole = encode(message)
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            decode(whole[:length])
    with pytest.raises(ProtocolError):
        decode(whole + b"\x00")


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(garbage)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_well_formed_msgpack_that_is_no_message_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(value))


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cancel"):
        decode(msgpack.packb({"kind": "cancel", "more": 1}))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb({"kind": "shutdown"}))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_come_back_as_they_were(token_ids: list[int]) -> None:
    assert unpack_ids(pack_ids(token_ids)) == token_ids


def test_a_token_id_of_more_than_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])


def test_a_resumed_request_keeps_prompt_and_output_apart() -> None:
    resumed = REQUEST.resume_after([7, 8])
    assert (resumed.prompt_length, resumed.output_length) == (3, 2)
    assert resumed.token_ids == [1, 2, 3, 7, 8]
    assert resumed.longest == REQUEST.longest == 12


def test_every_error_comes_back_as_what_it_was() -> None:
    for kind, error in ERRORS.items():
        revived = revive(kind, "why", 2.0)
        assert type(revived) is error
        assert (revived.kind, str(revived), revived.retry_after_s) == (kind, "why", 2.0)
    assert type(revive("OfALaterVersion", "why")) is ClusterError
    assert WorkerLost("x").retryable
    assert not ClusterError("x").retryable
