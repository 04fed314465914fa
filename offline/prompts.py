"""The prompts of a batch, checked before any of them runs. Pure, but for the tokenizer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cluster.api.text import Tokenizer
from offline.sampling_params import SamplingParams

Ids = Sequence[int]


def prompt_ids(
    prompts: str | Sequence[str] | None,
    prompt_token_ids: Sequence[Iterable[int]] | None,
    tokenizer: Tokenizer,
) -> list[list[int]]:
    """Token ids of each prompt; ids that are given come before a text.

    ValueError for none at all, for lists of different lengths, and for a prompt that is empty or
    has an id outside the vocabulary: with its number, and before anything has run.
    """
    texts = [prompts] if isinstance(prompts, str) else prompts
    if texts is None and prompt_token_ids is None:
        raise ValueError("give prompts or prompt_token_ids")
    if texts is not None and prompt_token_ids is not None and len(texts) != len(prompt_token_ids):
        raise ValueError(f"{len(texts)} prompts and {len(prompt_token_ids)} lists of token ids")
    found = (
        [tokenizer.encode(text) for text in texts or ()]
        if prompt_token_ids is None
        else [[operator.index(token) for token in ids] for ids in prompt_token_ids]
    )
    for number, ids in enumerate(found):
        if not ids:
            raise ValueError(f"prompt {number} is empty")
        for token in ids:
            if not 0 <= token < tokenizer.vocab_size:
                raise ValueError(
                    f"prompt {number}: token id {token} is outside the vocabulary of "
                    f"{tokenizer.vocab_size}"
                )
    return found


def params_of(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One for each of `count` prompts; a single one is for all. ValueError for another number."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if len(sampling_params) != count:
        raise ValueError(f"{len(sampling_params)} sampling_params for {count} prompts")
    return list(sampling_params)


def image_files(
    multi_modal_data: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None, count: int
) -> list[list[bytes]]:
    """The files of each prompt's images, as DeepInfer is given them: {"image_bytes": [...]}.

    One mapping is for one prompt. "image_sizes" is what the files say themselves, and not read.
    ValueError for another key, another number, or something else than bytes.
    """
    if multi_modal_data is None:
        return [[] for _ in range(count)]
    told = [multi_modal_data] if isinstance(multi_modal_data, Mapping) else list(multi_modal_data)
    if len(told) != count:
        raise ValueError(f"multi_modal_data of {len(told)} prompts where there are {count}")
    found = []
    for number, one in enumerate(told):
        for key in one or ():
            if key not in ("image_bytes", "image_sizes"):
                raise ValueError(f"multi_modal_data of prompt {number}: {key!r} is no key of it")
        files = list((one or {}).get("image_bytes") or ())
        if not all(isinstance(file, bytes) for file in files):
            raise ValueError(f"multi_modal_data of prompt {number}: image_bytes must be bytes")
        found.append(files)
    return found
