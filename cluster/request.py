"""What a request is: its prompt, how its tokens are chosen, what has been emitted of it.

Values only. Part of the language of cluster/messages.py, and read from there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field


class Value(BaseModel):
    """A frozen value; unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32 little endian; OverflowError for an id that does not fit."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return list(array("i", data))


class Sampling(Value):
    """How tokens are chosen. A missing seed is drawn once by the caller, never by a rank."""

    temperature: float = Field(default=0.0, ge=0.0, le=100.0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**63)
    max_tokens: int = Field(default=16, ge=1)
    stop_token_ids: tuple[int, ...] = ()
    ignore_stop: bool = False


class Request(Value):
    """One generation: the prompt, and what earlier attempts have already emitted.

    `output` is kept apart from `prompt`: usage, penalties and limits depend on the border. A rank
    prefills prompt + output and goes on with the token of index len(output).
    """

    request_id: str = Field(min_length=1, max_length=128)
    prompt: bytes = Field(repr=False)
    output: bytes = Field(default=b"", repr=False)
    sampling: Sampling = Sampling()

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far: what a prefill runs."""
        return unpack_ids(self.prompt + self.output)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt) // 4

    @property
    def output_length(self) -> int:
        return len(self.output) // 4

    @property
    def longest(self) -> int:
        """Positions that the request can ever use."""
        return self.prompt_length + self.sampling.max_tokens

    def resume_after(self, emitted: Sequence[int]) -> Request:
        """The same request when the caller has already got the tokens `emitted`."""
        return self.model_copy(update={"output": pack_ids(emitted)})
