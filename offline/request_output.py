"""What an offline engine tells of one token, under DeepInfer's names. Values only."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_LOGPROB = -9999.0  # floor of what is told


@dataclass(frozen=True)
class RequestOutput:
    """One token of one answer; the last one has the finish_reason.

    Reasons: "stop", "length", "prompt_length_exceeded", or what the request has ended with. An
    answer without a token is one of these with token_id -1.
    """

    request_id: str
    prompt_len: int
    token_id: int
    num_output_tokens: int  # this one included
    finish_reason: str = ""
    token_logprobs: float = LEAST_LOGPROB
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()  # of the prompt from its second token on; on the first

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)
