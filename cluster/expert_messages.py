"""What ranks and router say to each other about experts. Values only.

    rank   -> router    ExpertReport     | ExpertPlacement, while its group shall have another
                        ExpertReport       again and again; the stream's end is the rank's end
    caller -> router    AskExperts       | ExpertBalance

Tables and counts travel as bytes with a shape that bounds them. cluster/messages.py is where
everybody else imports these from; cluster/expert_tables.py turns them into arrays.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cluster.request import Value

# Several times what any model or domain has, and a whole report stays below one frame.
Layers = Annotated[int, Field(ge=1, le=512)]
Ranks = Annotated[int, Field(ge=1, le=1024)]
Slots = Annotated[int, Field(ge=1, le=4096)]
Experts = Annotated[int, Field(ge=1, le=4096)]
Version = Annotated[int, Field(ge=0, lt=2**31)]  # ranks compare it in half a word
Group = Annotated[str, Field(min_length=1, max_length=200)]

SLOT_BYTES = 2  # an expert's number, uint16 little endian
COUNT_BYTES = 4  # a number of tokens, uint32 little endian
MOST_BYTES = 16 << 20  # of one table or one report's counts


class ExpertTable(Value):
    """Which expert each slot holds: [layers, ranks, slots], expert numbers as uint16."""

    layers: Layers
    ranks: Ranks
    slots: Slots
    experts: Experts
    held: bytes = Field(max_length=MOST_BYTES, repr=False)

    @model_validator(mode="after")
    def _whole(self) -> ExpertTable:
        wanted = self.layers * self.ranks * self.slots * SLOT_BYTES
        if len(self.held) != wanted:
            raise ValueError(f"a table of {len(self.held)} bytes, where its shape has {wanted}")
        return self


class ExpertCounts(Value):
    """Tokens of each expert [layers, experts] as uint32, of one rank's own requests."""

    layers: Layers
    experts: Experts
    steps: int = Field(ge=1, lt=2**53)  # in which they were counted
    tokens: bytes = Field(max_length=MOST_BYTES, repr=False)

    @model_validator(mode="after")
    def _whole(self) -> ExpertCounts:
        wanted = self.layers * self.experts * COUNT_BYTES
        if len(self.tokens) != wanted:
            raise ValueError(f"counts of {len(self.tokens)} bytes, where their shape has {wanted}")
        return self


class ExpertSwitch(Value):
    """How a rank came to the placement that it has."""

    fetch_s: float = Field(ge=0)  # from the placement's arrival until its weights were there
    stall_s: float = Field(ge=0)  # by which the step loop stood still for it
    moved_bytes: int = Field(ge=0)


class ExpertReport(Value):
    """What a rank has, and what it has counted since its last report on this stream.

    `table` is there in the first report of a stream and whenever `version` has changed.
    """

    kind: Literal["expert_report"] = "expert_report"
    group: Group
    index: int = Field(ge=0, lt=1024)  # of the rank in its group
    version: Version
    table: ExpertTable | None = None
    counts: ExpertCounts | None = None
    preparing: str = Field(default="", max_length=1000)  # what it does for another placement
    switch: ExpertSwitch | None = None  # with the table of a version that was given to it


class ExpertPlacement(Value):
    """The placement that the rank's group shall have; the group switches as one."""

    kind: Literal["expert_placement"] = "expert_placement"
    group: Group
    version: Version
    table: ExpertTable


class AskExperts(Value):
    kind: Literal["ask_experts"] = "ask_experts"


class ExpertDecision(Value):
    """What the router decided for a group, or what became of it, and why."""

    at: float  # seconds since 1970
    outcome: Literal["kept", "given", "arrived", "given_up"]
    version: Version  # given, or the one that is kept
    why: str
    before: tuple[float, ...] = ()  # busiest rank over mean, by layer, as it was
    after: tuple[float, ...] = ()  # with the placement that was found
    moved: tuple[int, ...] = ()  # slots to fetch, by layer
    seconds: float = 0.0  # "kept", "given": of solving; "arrived": since it was given
    stall_s: float = 0.0  # "arrived": the longest that a rank's step loop stood still


class GroupBalance(Value):
    """What the router knows of one group."""

    group: Group
    version: Version
    given: Version | None  # on its way
    table: ExpertTable
    loads: ExpertCounts | None  # of the newest window
    imbalance: tuple[float, ...]  # in it, by layer, with the placement of now; () before the first
    windows: int  # that it has seen
    steps: int  # of the window that is open
    doing: str  # "" or why nothing is decided now
    preparing: str
    decisions: tuple[ExpertDecision, ...]  # oldest first


class ExpertBalance(Value):
    kind: Literal["expert_balance"] = "expert_balance"
    groups: tuple[GroupBalance, ...]
    waiting_for: tuple[str, ...] = ()  # live groups that have not reported whole
