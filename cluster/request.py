"""What a request is: its prompt, how its tokens are chosen, what has been emitted of it.

Values only. Part of the language of cluster/messages.py, and read from there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from cluster.image import Image as Image
from cluster.value import Value as Value

MAX_BAD_WORDS = 1024  # each is compared with the end of the output for every token


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32 little endian; OverflowError for an id that does not fit."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return list(array("i", data))


def positions_held(length: int, longest: int, part: float) -> int:
    """For how many positions a decode rank takes memory at the start.

    What is there, the next token, and `part` of all that may come after.
    """
    return min(longest, length + max(1, math.ceil(part * (longest - length))))


def _in(low: float, high: float, *, above: bool = False) -> AfterValidator:
    """Refuses what is not in [low, high], or in (low, high] with `above`; a NaN never is."""

    def check(value: float) -> float:
        if not (low < value if above else low <= value) or not value <= high:
            raise ValueError(f"must be in {'(' if above else '['}{low}, {high}], not {value}")
        return value

    return AfterValidator(check)


Bias = tuple[int, Annotated[float, _in(-100, 100)]]


class Grammar(Value):
    """What the text of an answer must be; docs/structured-output.md says what each kind takes.

    Whether it compiles is for cluster/grammars.py to say.
    """

    kind: Literal["regex", "json_schema", "ebnf"]
    text: str = Field(min_length=1, max_length=1 << 17, repr=False)

    @field_validator("text")
    @classmethod
    def _are_characters(cls, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("has half of a surrogate pair, which is no character") from None
        return text


class Sampling(Value):
    """How tokens are chosen; docs/sampling.md says what each does, over what, in which order.

    Defaults change nothing: greedy, over the whole vocabulary. A missing seed is drawn once by
    the caller, never by a rank. Whether ids are in the vocabulary is for check_request() to say.
    """

    temperature: Annotated[float, _in(0, 100)] = 0.0  # 0: greedy
    seed: Annotated[int, _in(0, 2**63 - 1)] = 0
    top_k: Annotated[int, _in(-1, 2**31 - 1)] = 0  # 0 or -1: off
    top_p: Annotated[float, _in(0, 1, above=True)] = 1.0
    min_p: Annotated[float, _in(0, 1)] = 0.0
    repetition_penalty: Annotated[float, _in(0, 100, above=True)] = 1.0
    presence_penalty: Annotated[float, _in(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, _in(-2, 2)] = 0.0
    logit_bias: tuple[Bias, ...] = ()  # (id, bias); a mapping of ids to biases is taken too
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of sequences that must not appear
    allowed_token_ids: tuple[int, ...] | None = None
    max_tokens: Annotated[int, _in(1, 2**31 - 1)] = 16
    min_tokens: Annotated[int, _in(0, 2**31 - 1)] = 0  # no stop id before that many
    stop_token_ids: tuple[int, ...] = ()
    ignore_stop: bool = False
    logprobs: Annotated[int, _in(0, 20)] | None = None  # how many alternatives; None: none at all
    prompt_logprobs: Annotated[int, _in(0, 20)] | None = None  # the same, of the prompt's tokens
    grammar: Grammar | None = None  # says what may come, and when the answer may end

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _as_pairs(cls, bias: object) -> object:
        return tuple(bias.items()) if isinstance(bias, Mapping) else bias

    @field_validator("logit_bias")
    @classmethod
    def _one_bias_an_id(cls, bias: tuple[Bias, ...]) -> tuple[Bias, ...]:
        ids = [token for token, _ in bias]
        if len(set(ids)) < len(ids):
            raise ValueError("must have one bias for a token id; an id is there twice")
        return bias

    @field_validator("bad_words")
    @classmethod
    def _sequences(cls, words: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if not all(words):
            raise ValueError("must be sequences of at least one token id; one is empty")
        if len(words) > MAX_BAD_WORDS:
            raise ValueError(f"must be at most {MAX_BAD_WORDS} sequences, not {len(words)}")
        return words

    @field_validator("allowed_token_ids")
    @classmethod
    def _something(
        cls, allowed: tuple[int, ...] | None, info: ValidationInfo
    ) -> tuple[int, ...] | None:
        if allowed == ():
            raise ValueError("must name at least one token id, or be None for all of them")
        banned = {word[0] for word in info.data.get("bad_words", ()) if len(word) == 1}
        if allowed is not None and banned.issuperset(allowed):
            raise ValueError("must name at least one token id that bad_words does not forbid")
        return allowed

    @field_validator("min_tokens")
    @classmethod
    def _reachable(cls, min_tokens: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens", min_tokens)  # absent if it is wrong itself
        if min_tokens > max_tokens:
            raise ValueError(f"must be in [0, max_tokens = {max_tokens}], not {min_tokens}")
        return min_tokens

    @field_validator("grammar")
    @classmethod
    def _can_end(cls, grammar: Grammar | None, info: ValidationInfo) -> Grammar | None:
        if grammar is not None and info.data.get("ignore_stop"):
            raise ValueError("ends the answer where it is complete, so ignore_stop cannot be true")
        return grammar

    def named_ids(self) -> Iterator[tuple[str, Sequence[int]]]:
        """(field, ids in it) for all fields that name token ids."""
        yield "stop_token_ids", self.stop_token_ids
        yield "logit_bias", [token for token, _ in self.logit_bias]
        yield "bad_words", [token for word in self.bad_words for token in word]
        yield "allowed_token_ids", self.allowed_token_ids or ()


class Request(Value):
    """One generation: the prompt, and what earlier attempts have already emitted.

    `output` is kept apart from `prompt`: usage, penalties and limits depend on the border. A rank
    prefills prompt + output and goes on with the token of index len(output).
    """

    request_id: str = Field(min_length=1, max_length=128)
    prompt: bytes = Field(repr=False)
    output: bytes = Field(default=b"", repr=False)
    sampling: Sampling = Sampling()
    images: tuple[Image, ...] = ()  # of the prompt, in order of position

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
    def scored(self) -> range:
        """Positions of the prompt whose log-probabilities are owed, before any token is.

        All but the first, which nothing precedes; none once there is output.
        """
        wanted = self.sampling.prompt_logprobs is not None and not self.output
        return range(1, self.prompt_length if wanted else 1)

    @property
    def longest(self) -> int:
        """Positions that the request can ever use."""
        return self.prompt_length + self.sampling.max_tokens

    def held(self, part: float) -> int:
        """Positions for which a decode rank takes memory at the start: see positions_held()."""
        return positions_held(self.prompt_length + self.output_length, self.longest, part)

    @property
    def image_bytes(self) -> int:
        """How much of it is pixels."""
        return sum(len(image.pixels) for image in self.images)

    def without_pixels(self) -> Request:
        """For those who only go on from its state."""
        if not self.image_bytes:
            return self
        images = tuple(image.without_pixels() for image in self.images)
        return self.model_copy(update={"images": images})

    def resume_after(self, emitted: Sequence[int]) -> Request:
        """The same request when the caller has already got the tokens `emitted`."""
        return self.model_copy(update={"output": pack_ids(emitted)})
