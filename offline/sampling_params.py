"""How the tokens of one offline request are chosen: DeepInfer's names, defaults and ranges.

Knows nothing of engines; `fields()` says the same in the words of cluster.request.Sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from offline.structured_output import grammar_of

GREEDY_BELOW = 1e-5  # DeepInfer's border
MOST_ALTERNATIVES = 20  # that an engine tells beside a token
_SEED_BITS = (1 << 63) - 1


@dataclass(frozen=True)
class SamplingParams:
    """Raises ValueError, or TypeError for `seq_seed`, that names the field.

    temperature           0 or more; below 1e-5 the likeliest token, of equals the lowest id
    top_p, top_k          (0, 1]; -1 (off) or 1 and more
    ignore_eos            no token ends the answer
    max_tokens            0 is taken as 1
    logprobs              no effect: the chosen token's is always told
    prompt_logprobs       tell those of the prompt, too
    top_logprobs          alternatives beside each token, at most 20
    first_n_token_no_eos  1: the first token does not end the answer
    so_args               structured output: offline/structured_output.py
    seq_seed              what the draws depend on; None: another one for each request
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    max_tokens: int = 16
    logprobs: int | None = None
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    first_n_token_no_eos: int = 0
    eos_id: int = 0  # the model's own is used, whatever stands here
    so_args: Mapping[str, Any] | None = None
    golden_token_ids: Sequence[int] | None = None
    seq_seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise ValueError(f"temperature must be 0 or more, and finite, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k != -1 and not 1 <= self.top_k < 1 << 31:
            raise ValueError(f"top_k must be -1, for all tokens, or 1 and more, not {self.top_k}")
        if not 0 <= self.max_tokens < 1 << 31:
            raise ValueError(f"max_tokens must be 1 or more, not {self.max_tokens}")
        if not 0 <= self.top_logprobs <= MOST_ALTERNATIVES:
            raise ValueError(
                f"top_logprobs must be in 0 to {MOST_ALTERNATIVES}, not {self.top_logprobs}"
            )
        if self.first_n_token_no_eos not in (0, 1):
            raise ValueError(f"first_n_token_no_eos must be 0 or 1: {self.first_n_token_no_eos}")
        if self.golden_token_ids is not None:
            raise ValueError(
                "golden_token_ids is not available: append the tokens to the prompt and ask for "
                "prompt_logprobs, which scores them"
            )
        if isinstance(self.seq_seed, bool) or not isinstance(self.seq_seed, int | None):
            raise TypeError(f"seq_seed must be an int, not {type(self.seq_seed).__name__}")
        if grammar_of(self.so_args) is not None and self.ignore_eos:
            raise ValueError("so_args ends the answer where it is whole: ignore_eos cannot be true")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def fields(self, *, tell_logprobs: bool = True) -> dict[str, Any]:
        """Keywords of cluster.client.build_request()."""
        max_tokens = max(1, self.max_tokens)
        fields: dict[str, Any] = {
            "temperature": 0.0 if self.greedy else self.temperature,
            "top_p": 1.0 if self.greedy else self.top_p,
            "top_k": 0 if self.greedy or self.top_k == -1 else self.top_k,
            "max_tokens": max_tokens,
            "min_tokens": self.first_n_token_no_eos,
            "ignore_stop": self.ignore_eos,
            "grammar": grammar_of(self.so_args),
            "seed": None if self.seq_seed is None else self.seq_seed & _SEED_BITS,
        }
        if tell_logprobs:
            fields["logprobs"] = self.top_logprobs
        if self.prompt_logprobs:
            fields["prompt_logprobs"] = self.top_logprobs
        return fields
