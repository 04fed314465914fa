"""One offline answer as it grows, and as DeepInfer tells it: one output a token."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.generation import Delta
from cluster.messages import TokenLogprobs
from offline.request_output import LEAST_LOGPROB, RequestOutput

NO_TOKEN = -1


@dataclass
class Answer:
    request_id: str
    prompt_length: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str = ""

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish = delta.finish or self.finish


def outputs_of(answer: Answer) -> list[RequestOutput]:
    """One for each token; one without a token for an answer that has none."""
    prompt = tuple(_floored(one.logprob) for one in answer.prompt_logprobs)
    if not answer.token_ids:
        return [
            RequestOutput(
                answer.request_id,
                answer.prompt_length,
                NO_TOKEN,
                0,
                finish_reason=answer.finish,
                prompt_logprobs=prompt,
            )
        ]
    outputs = []
    for index, token in enumerate(answer.token_ids):
        told = answer.logprobs[index] if answer.logprobs else TokenLogprobs(logprob=LEAST_LOGPROB)
        outputs.append(
            RequestOutput(
                answer.request_id,
                answer.prompt_length,
                token,
                index + 1,
                finish_reason=answer.finish if index + 1 == len(answer.token_ids) else "",
                token_logprobs=_floored(told.logprob),
                top_token_ids=tuple(token for token, _ in told.top),
                top_logprobs=tuple(_floored(value) for _, value in told.top),
                prompt_logprobs=() if index else prompt,
            )
        )
    return outputs


def _floored(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
