"""Everything that processes say to each other. Values only: no behaviour, no sockets.

Who says what (-> first message of a stream, then what may follow on the same stream):

    caller -> router    Route            | Routed, NoWorkers
    caller -> router    Watch            | Membership, again on every change
    rank   -> router    Report           | repeated; the stream's end is the rank's end
    caller -> router    Suspect          | nothing: a rank does not answer
    head   -> router    Guard            | Suspect, again for each suspicion of one of its ranks
    rank   -> router    ExpertReport, AskExperts: see cluster/expert_messages.py
    caller -> prefill   Prefill          | Started, PromptLogprobs if asked for, Tokens (index 0),
                                           PushFailed, HandedOver, Failed
                        PushTo, Cancel     from the caller, on the same stream
    caller -> decode    Reserve          | Reserved, NoRoomNow, DrainingNow, Failed,
                                           then Tokens from index 1
                        Cancel, Stop       from the caller, on the same stream
    caller -> decode    Generate         | Started, PromptLogprobs if asked for, Tokens from
                                           index 0, Failed (colocated, or a short prompt)
                        Cancel, Stop       from the caller, on the same stream
    prefill -> decode   Connect          | Connected, Failed: once per pair of incarnations
    prefill -> decode   OpenPush         | PushOpened, Unpacked, Accepted, RejectedNow, Cancel
                        Planned, Pushed,   from prefill, on the same stream
                        Commit
                        Cancelled          from prefill, asked by decode's Cancel or not
    prefill -> decode   Cancelled        | nothing: of a direct push whose own stream broke off
    caller -> prefill   AskPairs         | Pairs

Closing a stream cancels what it asked for. Whatever is lost before decode has accepted, prefill
keeps the state and waits for the next PushTo. Failed with `Preempted` comes after all tokens that
were made: the caller prefills again from there, and asks for `whole` memory. Token ids travel as
bytes (int32, little endian), images as pixels (uint8) to whoever runs the prompt; Reserve has none.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.expert_messages import AskExperts as AskExperts
from cluster.expert_messages import ExpertBalance as ExpertBalance
from cluster.expert_messages import ExpertPlacement as ExpertPlacement
from cluster.expert_messages import ExpertReport as ExpertReport
from cluster.image_rules import ImageRules
from cluster.request import Image as Image
from cluster.request import Request as Request
from cluster.request import Sampling as Sampling
from cluster.request import Value as Value
from cluster.request import pack_ids as pack_ids
from cluster.request import unpack_ids as unpack_ids
from cluster.transfer_messages import Accepted as Accepted
from cluster.transfer_messages import AskPairs as AskPairs
from cluster.transfer_messages import Commit as Commit
from cluster.transfer_messages import Connect as Connect
from cluster.transfer_messages import Connected as Connected
from cluster.transfer_messages import OpenPush as OpenPush
from cluster.transfer_messages import PairPath as PairPath
from cluster.transfer_messages import Pairs as Pairs
from cluster.transfer_messages import PieceDigest as PieceDigest
from cluster.transfer_messages import Planned as Planned
from cluster.transfer_messages import Pushed as Pushed
from cluster.transfer_messages import PushOpened as PushOpened
from cluster.transfer_messages import RejectedNow as RejectedNow
from cluster.transfer_messages import Segment as Segment
from cluster.transfer_messages import Span as Span
from cluster.transfer_messages import Unpacked as Unpacked

PROTOCOL_VERSION = 3

Role = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length"]


# ------------------------------------------------------------------ who a process is


class Address(Value):
    host: str
    port: int = Field(ge=1, le=65535)


class Endpoint(Value):
    """One life of one rank. A restarted process has a new incarnation, so another endpoint."""

    name: str  # "decode-0/1": group and rank, for people
    role: Role
    incarnation: str
    address: Address


class Load(Value):
    """What a rank has to do and what it has left; the router's only input besides liveness."""

    waiting: int = 0  # requests not started
    running: int = 0
    waiting_tokens: int = 0  # prompt tokens not yet run
    free_blocks: int = 0
    total_blocks: int = 0
    free_slots: int = 0
    max_length: int = 0  # longest sequence it serves
    block_tokens: int = 0
    vocab_size: int = 0  # token ids from here on mean nothing to its model
    output_reserved: float = 1.0  # part of an answer's need that it holds memory for at the start
    images: ImageRules | None = None  # what its vision encoder takes; None: it has none


class Member(Value):
    """A rank as the router sees it."""

    endpoint: Endpoint
    load: Load
    draining: bool = False
    balanced: bool = False  # its group shares experts, and it reports what they do
    follows: bool = False  # it computes the prompts of another rank, and takes no request


# ------------------------------------------------------------------ messages


class Hello(Value):
    """First frame of either side of a connection: who, and a fresh nonce."""

    kind: Literal["hello"] = "hello"
    version: int
    role: str  # "prefill", "decode", "router", "caller"
    incarnation: str
    nonce: bytes = Field(min_length=16, max_length=64)


class Proof(Value):
    """HMAC of both nonces, role and incarnation under the cluster's secret."""

    kind: Literal["proof"] = "proof"
    mac: bytes = Field(min_length=32, max_length=32)


class Failed(Value):
    """An error in place of an answer; `error` is a kind of cluster/errors.py."""

    kind: Literal["failed"] = "failed"
    error: str
    message: str
    retry_after_s: float | None = None


class Route(Value):
    kind: Literal["route"] = "route"
    request_id: str
    length: int  # tokens to prefill
    longest: int  # positions to reserve
    avoid: tuple[str, ...] = ()  # incarnations that this request has lost
    decode_only: bool = False  # a prefill rank has it already; only its place is sought
    colocated: bool = False  # one decode rank shall do it all, whatever the configuration says
    whole: bool = False  # it was preempted: goes where all that it can need is free
    images: bool = False  # whoever runs the prompt needs a vision encoder


class Routed(Value):
    """`prefill` is None when one decode rank shall do it all."""

    kind: Literal["routed"] = "routed"
    prefill: Endpoint | None
    decode: Endpoint


class NoWorkers(Value):
    kind: Literal["no_workers"] = "no_workers"
    message: str
    retry_after_s: float


class Report(Value):
    kind: Literal["report"] = "report"
    member: Member


class Suspect(Value):
    """Somebody waited for a life of a rank and heard nothing, or could not get there.

    No proof of anything: the rank's head asks the rank itself.
    """

    kind: Literal["suspect"] = "suspect"
    incarnation: str
    why: str


class Guard(Value):
    """A head wants to hear of suspicions against these ranks, its own."""

    kind: Literal["guard"] = "guard"
    incarnations: tuple[str, ...]


class Watch(Value):
    kind: Literal["watch"] = "watch"


class Membership(Value):
    kind: Literal["membership"] = "membership"
    members: tuple[Member, ...]


class Prefill(Value):
    kind: Literal["prefill"] = "prefill"
    request: Request
    attempt: int


class Generate(Value):
    """Prefill and decode on one rank."""

    kind: Literal["generate"] = "generate"
    request: Request
    attempt: int
    whole: bool = False  # it was preempted: starts when all that it can need is free


class Started(Value):
    """The first chunk of the prompt is scheduled."""

    kind: Literal["started"] = "started"
    queued_s: float


class Reserve(Value):
    """`whole`: it was preempted. It waits in turn until all that it can need is free, and is not
    refused for want of room; the others get what the rank reserves at the start, or NoRoomNow."""

    kind: Literal["reserve"] = "reserve"
    request: Request
    attempt: int
    whole: bool = False


class Reserved(Value):
    kind: Literal["reserved"] = "reserved"
    reservation: str  # "<incarnation of D>:<serial>", never used twice
    segment: Segment


class NoRoomNow(Value):
    kind: Literal["no_room"] = "no_room"
    retry_after_s: float


class DrainingNow(Value):
    kind: Literal["draining"] = "draining"


class PushTo(Value):
    kind: Literal["push_to"] = "push_to"
    reservation: str
    segment: Segment
    decode: Endpoint


class TokenLogprobs(Value):
    """What the model itself thought of a token: natural logarithms of its own probabilities."""

    logprob: float  # of the token
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob): the likeliest at its place, best first


class Tokens(Value):
    """Tokens of a request from index `first` on; `finish` comes with the last of them.

    `logprobs` has one entry a token if the request asks for them, else none at all.
    """

    kind: Literal["tokens"] = "tokens"
    first: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


class PromptLogprobs(Value):
    """Of the prompt's tokens at positions `first` and following: as each chunk is computed.

    In order from position 1 on, and all of them before the first token of the answer.
    """

    kind: Literal["prompt_logprobs"] = "prompt_logprobs"
    first: int
    logprobs: tuple[TokenLogprobs, ...]


class HandedOver(Value):
    """Prefill's word to the caller that decode has accepted the state."""

    kind: Literal["handed_over"] = "handed_over"
    bytes_moved: int
    pushes: int
    push_s: float  # seconds in gather and write
    hidden_s: float = 0.0  # of these, until the end of the last chunk: nobody waited for them
    tail_s: float  # from the end of the last chunk to Accepted
    path: str  # which transport carried it, e.g. "nixl/UCX"
    reservation: str = ""  # which one; there may have been others before it


class PushFailed(Value):
    """Prefill cannot bring the state to that reservation; it keeps it for another one.

    Often the caller has heard of the loss from the decode rank already. Not if only the path
    between the two ranks is broken: then both are well, and nobody else knows.
    """

    kind: Literal["push_failed"] = "push_failed"
    reservation: str
    why: str


class Cancel(Value):
    """The sender of this gives up what the stream is about."""

    kind: Literal["cancel"] = "cancel"


class Stop(Value):
    """The answer is complete: the caller has found its end, and needs no token from `index` on."""

    kind: Literal["stop"] = "stop"
    index: int = Field(ge=0)


class Cancelled(Value):
    """No write of the sender can land any more. `reservation` is said where the stream does not."""

    kind: Literal["cancelled"] = "cancelled"
    reservation: str = ""


WireMessage = Annotated[
    Hello
    | Proof
    | Failed
    | Route
    | Routed
    | NoWorkers
    | Report
    | Watch
    | Suspect
    | Guard
    | Membership
    | Prefill
    | Generate
    | Started
    | Reserve
    | Reserved
    | NoRoomNow
    | DrainingNow
    | PushTo
    | Tokens
    | PromptLogprobs
    | HandedOver
    | PushFailed
    | Cancel
    | Stop
    | Cancelled
    | Connect
    | Connected
    | OpenPush
    | PushOpened
    | Planned
    | Pushed
    | Unpacked
    | Commit
    | Accepted
    | RejectedNow
    | AskPairs
    | Pairs
    | ExpertReport
    | ExpertPlacement
    | AskExperts
    | ExpertBalance,
    Field(discriminator="kind"),
]
