"""One HTTP request, understood: what is asked for, and one choice for each answer to be made.

Everything that can be wrong with a request is found here. Nothing waits and nothing is shared, so
it can run in any thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from cluster.api.answer_text import AnswerText
from cluster.api.completion_body import CompletionBody, parse_completion
from cluster.api.completion_requests import build_requests
from cluster.api.image_field import ImageField
from cluster.api.openai import Completion, UnknownModel, Usage
from cluster.api.output_format import BadField
from cluster.api.prompt_text import Echo, PlainEcho, ScoredEcho
from cluster.api.stop_strings import StopStrings
from cluster.api.text import Tokenizer
from cluster.messages import Request, unpack_ids
from cluster.timeline import Timeline


@dataclass
class Choice:
    """One answer that is being made."""

    request: Request
    text: AnswerText
    echo: Echo  # shown before everything else


@dataclass(frozen=True)
class Ask:
    """`timeline` only if the client wants to see it."""

    body: CompletionBody
    choices: list[Choice]
    completion: Completion
    timeline: Timeline | None

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many answers it gets."""
        prompts = self.choices[:: self.body.n]
        return Usage(
            prompt_tokens=sum(choice.request.prompt_length for choice in prompts),
            completion_tokens=sum(choice.text.count for choice in self.choices),
        )

    @property
    def image_bytes(self) -> int:
        """Pixels that are held until the last answer is made; answers to a prompt share them."""
        return sum(choice.request.image_bytes for choice in self.choices[:: self.body.n])

    @property
    def tells_tokens(self) -> bool:
        return self.body.logprobs is not None or self.body.return_token_ids


def understand(
    raw: bytes,
    completion_id: str,
    *,
    tokenizer: Tokenizer,
    model: str,
    max_length: int,
    max_answers: int,
    image_field: ImageField,
) -> Ask:
    """BadRequest, or a kind of it, for a body that is refused; `raw` is all of it.

    `model` is the name that is served, `max_length` the longest prompt and answer in tokens,
    `max_answers` how many answers one body may ask for.
    """
    body = parse_completion(raw)
    if body.model not in (None, model):
        raise UnknownModel(f"model {body.model[:64]!r} is not served here; {model!r} is")
    if len(body.prompt) * body.n > max_answers:
        raise BadField(
            "prompt" if len(body.prompt) > 1 else "n",
            f"{len(body.prompt) * body.n} answers are asked for; this server makes "
            f"{max_answers} at a time",
        )
    requests = build_requests(body, completion_id, tokenizer, max_length, image_field)
    stops = StopStrings(body.stop)
    created = int(time.time())
    ask = Ask(
        body=body,
        choices=[],
        completion=Completion(completion_id, created, model, null_usage=body.include_usage),
        timeline=Timeline() if body.timeline else None,
    )
    for index, request in enumerate(requests):
        echo = _echo(body, body.prompt[index // body.n], request, tokenizer)
        text = AnswerText(
            tokenizer,
            stops,
            offset=echo.length,
            min_tokens=body.min_tokens,
            show_stop=body.include_stop_str_in_output,
            tell_tokens=ask.tells_tokens,
        )
        ask.choices.append(Choice(request, text, echo))
    return ask


def _echo(
    body: CompletionBody, prompt: str | list[int], request: Request, tokenizer: Tokenizer
) -> Echo:
    if not body.echo:
        return PlainEcho("")
    if body.logprobs is not None:
        return ScoredEcho(unpack_ids(request.prompt), tokenizer)
    return PlainEcho(prompt if isinstance(prompt, str) else tokenizer.decode(prompt))
