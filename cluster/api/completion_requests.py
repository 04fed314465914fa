"""A body becomes requests: one for each answer, checked against vocabulary and length.

Whatever could harm an engine or never be served is refused here, before any rank hears of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from cluster.api.completion_body import CompletionBody, bad_field
from cluster.api.image_field import ImageField
from cluster.api.output_format import BadField
from cluster.api.text import Tokenizer
from cluster.errors import PromptTooLong
from cluster.limits import check_request
from cluster.messages import Request, Sampling, pack_ids
from cluster.seeds import choice_seed

MOST_CHARACTERS = 128  # of one token: a prompt with more of them a position is too long, unread


def build_requests(
    body: CompletionBody,
    completion_id: str,
    tokenizer: Tokenizer,
    max_length: int,
    image_field: ImageField,
) -> list[Request]:
    """Answers of prompt 0 first; request ids are the completion's, numbered if there are several.

    Answer i of a prompt has choice_seed(seed, i), whatever other prompts there are. A missing
    seed is drawn here, once for each prompt.
    """
    sampling = _sampling(body, tokenizer)
    requests: list[Request] = []
    for prompt in body.prompt:
        token_ids, images = image_field.placed(
            _token_ids(prompt, tokenizer, max_length), body.images
        )
        packed = pack_ids(token_ids)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        for index in range(body.n):
            several = len(body.prompt) * body.n > 1
            request = Request(
                request_id=f"{completion_id}-{len(requests)}" if several else completion_id,
                prompt=packed,
                sampling=sampling.model_copy(update={"seed": choice_seed(seed, index)}),
                images=images,
            )
            if index == 0:
                check_request(request, max_length, tokenizer.vocab_size)
            requests.append(request)
    return requests


def _sampling(body: CompletionBody, tokenizer: Tokenizer) -> Sampling:
    demand = body.demand()
    try:
        sampling = Sampling(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=tuple((_bias_id(key), bias) for key, bias in body.logit_bias.items()),
            bad_words=_bad_words(body.bad_words, tokenizer),
            allowed_token_ids=_tuple(body.allowed_token_ids),
            max_tokens=body.max_tokens,
            min_tokens=body.min_tokens,
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_stop=body.ignore_eos,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            grammar=None if demand is None else demand.grammar,
        )
    except ValidationError as error:
        raise bad_field(error) from error
    for field, token_ids in sampling.named_ids():
        _check_ids(field, token_ids, tokenizer.size, "the tokenizer knows")
    return sampling


def _bias_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise BadField("logit_bias", f"{key[:40]!r} is not a token id")
    return int(key)


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each as it is and as it follows a space: vocabularies have the space within the token."""
    spellings = (spelling for word in words for spelling in (word, " " + word.lstrip(" ")))
    return tuple(dict.fromkeys(tuple(tokenizer.encode(spelling)) for spelling in spellings))


def _token_ids(prompt: str | list[int], tokenizer: Tokenizer, max_length: int) -> Sequence[int]:
    if isinstance(prompt, list):
        token_ids = prompt
    elif len(prompt) > MOST_CHARACTERS * max_length:
        raise PromptTooLong(
            f"prompt: {len(prompt)} characters cannot be {max_length} tokens, which is the most "
            "that is served"
        )
    else:
        token_ids = tokenizer.encode(prompt)
    if not token_ids:
        raise BadField("prompt", "is empty; at least one token is needed")
    _check_ids("prompt", token_ids, tokenizer.vocab_size, "the model knows")
    return token_ids


def _check_ids(param: str, token_ids: Sequence[int], size: int, who: str) -> None:
    lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
    if lowest < 0 or highest >= size:
        wrong = lowest if lowest < 0 else highest
        raise BadField(param, f"token id {wrong} is not in 0 .. {size - 1}, which {who}")


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
