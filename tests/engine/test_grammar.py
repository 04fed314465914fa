"""A grammar as the sampler sees it: what it lets come, where it ends, and who wins."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cluster.api.text import load_tokenizer
from cluster.errors import BadRequest
from cluster.grammars import Grammars
from cluster.messages import Request, Sampling, pack_ids
from cluster.request import Grammar
from engine.choice import Choice
from engine.context import Context
from engine.grammar import THREADS, Compiled, Compiler, Constraint, MaskThreads
from engine.sampler import sample
from tests.tiny import MODEL

TOKENIZER = load_tokenizer(MODEL)
GRAMMARS = Grammars(MODEL)
POOL = MaskThreads(20.0)
EOS = 1
V = TOKENIZER.vocab_size


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def one_id(text: str) -> int:
    (token,) = ids(text)
    return token


def context(regex: str, output: Sequence[int] = (), **options: Any) -> Context:
    grammar = Grammar(kind="regex", text=regex)
    sampling = Sampling(**({"max_tokens": 100, "grammar": grammar} | options))
    request = Request(request_id="r", prompt=pack_ids([5, 6]), sampling=sampling)
    token_ids = [5, 6, *output]
    stop_ids = frozenset((EOS, *sampling.stop_token_ids))
    constraint = Constraint(grammar, GRAMMARS, POOL, token_ids, 2)
    return Context(request, token_ids, stop_ids, constraint)


def liking(*wanted: int) -> torch.Tensor:
    """Logits [1, V] that like these ids most, the first above all."""
    logits = torch.zeros(1, V)
    for place, token in enumerate(wanted):
        logits[0, token] = 100.0 - place
    return logits


def next_id(one: Context, *wanted: int) -> int:
    (choice,) = sample(liking(*wanted), [one])
    assert isinstance(choice, Choice), choice
    return choice.token


A, B, Z = one_id("a"), one_id("b"), one_id("z")


def test_only_what_the_grammar_lets_come_comes_whatever_the_model_likes() -> None:
    assert next_id(context("[ab]{2}"), Z, EOS, B) == B
    assert next_id(context("[ab]{2}", [B]), Z, EOS, A) == A


def test_the_answer_may_end_exactly_where_it_is_whole() -> None:
    assert next_id(context("ab?"), EOS, B, A) == A
    assert next_id(context("ab?", [A]), EOS, B) == EOS
    assert next_id(context("ab?", [A]), B, EOS) == B
    assert next_id(context("ab?", [A, B]), Z) == EOS


def test_a_stop_id_is_an_end_and_never_a_part_of_the_text() -> None:
    assert next_id(context("ab?", stop_token_ids=(A, Z)), A, Z, EOS) not in (A, Z, EOS)
    assert next_id(context("bb?", [B], stop_token_ids=(A, Z)), Z) == Z
    with pytest.raises(AssertionError, match="leave no token"):
        next_id(context("a", stop_token_ids=(A,)), A)  # the only way to write it ends it


def test_bias_and_penalties_choose_among_what_may_come() -> None:
    assert next_id(context("[ab]", logit_bias={Z: 100.0, A: 1.0}), B) == B
    assert next_id(context("[ab]", logit_bias={A: 50.0, B: -100.0}), B) == A
    again = context("[ab]{9}", [B], repetition_penalty=100.0, frequency_penalty=2.0)
    assert next_id(again, B, A) == A


def test_bad_words_and_allowed_ids_narrow_it_and_the_end_stays_the_grammars() -> None:
    assert next_id(context("[ab]", bad_words=((A,),)), A, B) == B
    assert next_id(context("[ab]", allowed_token_ids=(B, Z)), A, Z, B) == B
    assert next_id(context("[ab]", [A], allowed_token_ids=(A, B)), B) == EOS


def test_masks_that_leave_nothing_end_this_request_with_a_reason_and_no_other() -> None:
    stuck = context("[ab]", allowed_token_ids=(Z,))
    first, second, third = sample(
        liking(A).expand(3, -1), [context("[ab]"), stuck, context("[ab]")]
    )
    assert isinstance(first, Choice)
    assert isinstance(third, Choice)
    assert isinstance(second, BadRequest)
    assert "grammar" in str(second)


def test_min_tokens_puts_the_end_off_while_something_else_may_come() -> None:
    assert next_id(context("a+", [A], min_tokens=2), EOS, A) == A
    assert next_id(context("a+", [A, A], min_tokens=2), EOS, A) == EOS
    assert next_id(context("a", [A], min_tokens=2), Z) == EOS  # nothing else may


def test_a_draw_is_among_what_may_come() -> None:
    one = context("[ab]{2}", temperature=5.0, seed=3)
    (choice,) = sample(torch.zeros(1, V), [one])
    assert isinstance(choice, Choice)
    assert TOKENIZER.decode([choice.token]) in ("a", "b", "aa", "ab", "ba", "bb")


def test_a_context_made_anew_in_mid_answer_says_what_the_old_one_says() -> None:
    grammar = r'\{"k": ?"[a-f]{3,9}", ?"n": ?-?[0-9]{1,4}\}'
    request = context(grammar, temperature=3.0, seed=11).request
    output: list[int] = []
    token_ids = [5, 6]
    assert request.sampling.grammar is not None
    old = Context(
        request,
        token_ids,
        frozenset([EOS]),
        Constraint(request.sampling.grammar, GRAMMARS, POOL, token_ids, 2),
    )
    logits = torch.randn(60, V, generator=torch.Generator().manual_seed(1))
    for row in logits:
        new = context(grammar, output, temperature=3.0, seed=11)
        first, second = sample(row.expand(2, -1), [old, new])
        assert first == second
        assert isinstance(first, Choice)
        if first.token == EOS:
            break
        token_ids.append(first.token)
        output.append(first.token)
    assert output
    assert isinstance(first, Choice)
    assert first.token == EOS


class Slow:
    """A grammar that computes what may come, and never has it until it is told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def compile(self, grammar: Grammar) -> Compiled:
        return self

    def follow(self) -> Slow:
        return self

    def feed(self, token_ids: Sequence[int]) -> None: ...

    def mask(self) -> tuple[bytearray, bool]:
        block = bytes(1 << 18)  # long enough to be hashed without the interpreter's lock
        while not self.go_on.is_set():
            hashlib.sha256(block).digest()
        return bytearray(b"\xff" * (V // 8)), False


def test_slow_grammars_end_their_requests_and_their_neighbours_go_on() -> None:
    """More are stuck than there are threads, and the neighbour's mask waits behind them all."""
    slow, threads, token_ids = Slow(), MaskThreads(0.05), [5, 6]
    quick = context("[ab]")

    def of(grammar: Grammar, compiler: Compiler) -> Context:
        constraint = Constraint(grammar, compiler, threads, token_ids, 2)
        constraint.begin()
        return Context(quick.request, token_ids, frozenset([EOS]), constraint)

    grammar = Grammar(kind="regex", text="[ab]")
    stuck = [of(grammar, slow) for _ in range(THREADS + 2)]
    *refused, neighbour = sample(
        liking(A).expand(len(stuck) + 1, -1), [*stuck, of(grammar, GRAMMARS)]
    )
    slow.go_on.set()
    for one in refused:
        assert isinstance(one, BadRequest)
        assert "too complex" in str(one)
    assert isinstance(neighbour, Choice)
    assert neighbour.token == A


class Late(Slow):
    """Waits long, and computes little: the machine has been busy with something else."""

    def mask(self) -> tuple[bytearray, bool]:
        assert not self.go_on.wait(0.3)
        return bytearray(b"\xff" * (V // 8)), False


def test_a_mask_that_a_busy_machine_keeps_waiting_is_waited_for() -> None:
    constraint = Constraint(Grammar(kind="regex", text="x"), Late(), MaskThreads(0.1), [5], 1)
    assert constraint.allowed().ids_V.all()


class Panic(BaseException):
    """As a library in Rust has them."""


class Panicking(Slow):
    def mask(self) -> tuple[bytearray, bool]:
        raise Panic("index out of bounds")


def test_a_panic_ends_its_request_alone() -> None:
    one = context("[ab]")
    constraint = Constraint(Grammar(kind="regex", text="x"), Panicking(), POOL, [5, 6], 2)
    broken = Context(one.request, [5, 6], frozenset([EOS]), constraint)
    first, second = sample(liking(A).expand(2, -1), [broken, one])
    assert isinstance(first, BadRequest)
    assert "index out of bounds" in str(first)
    assert isinstance(second, Choice)


def test_an_output_that_does_not_follow_is_an_error_of_that_request() -> None:
    (outcome,) = sample(liking(A), [context("[ab]+", [Z])])
    assert isinstance(outcome, BadRequest)
    assert "does not follow" in str(outcome)


def test_logprobs_are_the_models_own_grammar_or_not() -> None:
    (choice,) = sample(liking(Z, A), [context("[ab]", logprobs=1)])
    assert isinstance(choice, Choice)
    assert choice.logprobs is not None
    assert choice.logprobs.top[0][0] == Z
    assert math.isclose(choice.logprobs.logprob, -1.31, abs_tol=0.01)
