"""Grammars, compiled for one model's tokens; and the verdict on those that cannot be.

The only file that knows llguidance. The same code judges at the cluster's edge and on every rank:
by bounds on the text, then by counted work, never by a clock, so the verdict on a grammar is the
same wherever it is asked for and whatever came before. Knows nothing of requests and of logits.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from cluster.errors import BadRequest, NoRoom
from cluster.grammar_bounds import check_bounds
from cluster.request import Grammar
from cluster.schema_patterns import leaves_out_escaped

KEPT = 64  # compiled grammars and refusals, latest used last; some MB each at most
THREADS = 2  # compile; the interpreter is free meanwhile
MOST_WAITING = 64  # for a thread
COMPILE_S = 20.0  # of waiting for the verdict: what passes the bounds needs less than one

_LIMITS = LLParserLimits(
    max_items_in_row=5000,  # four for each optional property of an object that may come next
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,  # 1 to 2 kB each, for each answer that is being made
    max_grammar_size=200_000,
    verbose_errors=False,  # they quote whole grammars
)
_SCHEMA_DEFAULTS: Any = {"whitespace_pattern": r"[ \n\t]{0,32}"}  # a model could go on for ever
_SCHEMA_OVERRIDES = {"lenient": False}  # a keyword that is not understood is refused
_NO_QUOTE = {"json_allowed_escapes": "nrbtfu"}  # neither a quote nor a backslash
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_RULE = re.compile(r"^\s*([\w-]+)\s*::=", re.MULTILINE)


class Compiled:
    """A grammar that can be followed, by any number of answers."""

    def __init__(self, pristine: LLMatcher, end: int) -> None:
        """`end` is the id that stands for the end of a text in its masks."""
        self._pristine = pristine
        self._end = end

    def follow(self) -> Following:
        """From the beginning of a text."""
        return Following(self._pristine.deep_copy(), self._end)


class Following:
    """How far one text has come; for one thread at a time."""

    def __init__(self, matcher: LLMatcher, end: int) -> None:
        self._matcher = matcher
        self._end = end

    def feed(self, token_ids: Sequence[int]) -> None:
        """BadRequest if the text cannot go on like this."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise BadRequest(f"grammar: the output does not follow it: {self._why()}")

    def mask(self) -> tuple[bytearray, bool]:
        """What may come next, a bit an id beginning with the lowest; and whether the text may end.

        The bit of the id that ends a text is never set. BadRequest if it is too much work to say.
        """
        mask = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise BadRequest(f"grammar: no text can go on from here: {self._why()}")
        byte, bit = divmod(self._end, 8)
        whole = bool(mask[byte] >> bit & 1)
        mask[byte] &= ~(1 << bit)
        return mask, whole

    def _why(self) -> str:
        return _reason(self._matcher.get_error())


class Grammars:
    """The vocabulary is read when the first grammar comes; BadRequest if there is none."""

    def __init__(self, folder: str | Path) -> None:
        """`folder` is a model's, with tokenizer.json and config.json."""
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._made: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._waiting = 0

    async def check(self, grammar: Grammar | None) -> None:
        """BadRequest for one that cannot be compiled, however often it is asked; beside the loop.

        NoRoom if too many wait for their verdict already.
        """
        if grammar is None:
            return
        with self._lock:
            made = self._made.get(grammar)
        if made is None or not made.done():
            await self._in_thread(grammar)
        self.compile(grammar)

    def compile(self, grammar: Grammar) -> Compiled:
        """Once for equal grammars, while they are remembered; from any thread."""
        with self._lock:
            made = self._made.get(grammar)
            mine = made is None
            if made is None:
                made = self._made[grammar] = Future()
                while len(self._made) > KEPT:
                    self._made.popitem(last=False)
            self._made.move_to_end(grammar)
        if mine:
            try:
                made.set_result(self._build(grammar))
            except BadRequest as refusal:
                made.set_exception(refusal)
            except BaseException as error:  # a panic of the library is no Exception
                made.set_exception(BadRequest(f"grammar: cannot be compiled: {error!r}"))
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
        if refused := made.exception():
            raise BadRequest(str(refused))  # a new one: raising adds to an error
        return made.result()

    async def _in_thread(self, grammar: Grammar) -> None:
        if self._waiting >= MOST_WAITING:
            raise NoRoom(f"{self._waiting} grammars wait to be compiled", retry_after_s=1.0)
        self._waiting += 1
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COMPILE_S):
                await loop.run_in_executor(self._threads, self.compile, grammar)
        except TimeoutError:
            raise NoRoom(
                f"no verdict on the grammar within {COMPILE_S:g} s", retry_after_s=1.0
            ) from None
        finally:
            self._waiting -= 1

    def _build(self, grammar: Grammar) -> Compiled:
        check_bounds(grammar)
        vocabulary = self._vocabulary()
        matcher = LLMatcher(vocabulary, _source(grammar), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise BadRequest(f"grammar: {_reason(matcher.get_error())}")
        compiled = Compiled(matcher, vocabulary.eos_token)
        mask, _ = compiled.follow().mask()
        if not any(mask):
            raise BadRequest("grammar: only an empty text could follow it")
        return compiled

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def _vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            return self._tokens

    @cached_property
    def _tokens(self) -> LLTokenizer:
        """Reading a large vocabulary takes a second or two."""
        try:
            text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
            return LLTokenizer(text, eos_token=int(config["eos_token_id"]))
        except (OSError, ValueError, KeyError) as error:
            raise BadRequest(
                f"grammar: the model in {self._folder} has no tokenizer to follow one with: {error}"
            ) from error


def _source(grammar: Grammar) -> str:
    """In llguidance's own language."""
    try:
        match grammar.kind:
            case "regex":
                return LLMatcher.grammar_from_regex(_ascii_digits(grammar.text))
            case "json_schema":
                more: Any = _NO_QUOTE if leaves_out_escaped(grammar.text) else {}
                return LLMatcher.grammar_from_json_schema(
                    grammar.text, _SCHEMA_DEFAULTS, _SCHEMA_OVERRIDES | more
                )
            case "ebnf":
                return LLMatcher.grammar_from_lark(_lark(grammar.text))
    except ValueError as error:
        raise BadRequest(f"grammar: {error}") from error


def _ascii_digits(regex: str) -> str:
    r"""With \d as 0-9, which every library takes for digits; others of them came with some version
    of Unicode or other. In a negated class it stays, because there fewer digits let more come."""
    made: list[str] = []
    classes: list[tuple[bool, int]] = []  # of each that is open: whether negated, where it begins
    place = 0
    while place < len(regex):
        piece = regex[place : place + (2 if regex[place] == "\\" else 1)]
        if piece == r"\d" and not any(negated for negated, _ in classes):
            made.append("0-9" if classes else "[0-9]")
        else:
            made.append(piece)
        if piece == "[":
            negated = regex.startswith("^", place + 1)
            classes.append((negated, place + 1 + negated))
        elif piece == "]" and classes and place > classes[-1][1]:  # the first is just itself
            classes.pop()
        place += len(piece)
    return "".join(made)


def _lark(text: str) -> str:
    """EBNF with ::= as Lark; what is Lark already, as it is."""
    rules = _RULE.findall(text)
    if not rules:
        return text
    for rule in rules:
        if rules.count(rule) > 1:  # the converter would take the last one
            raise BadRequest(f"grammar: rule {rule!r} is there twice")
    try:
        return str(any_to_lark(_ESCAPED.sub(_character, text)))
    except Exception as error:  # it has errors of its own, and IndexError and RecursionError
        raise BadRequest(f"grammar: {_reason(str(error))}") from error


def _character(escape: re.Match[str]) -> str:
    """The converter loses leading zeros of these; ASCII may be syntax and stays escaped."""
    code = int(escape[2] or escape[3], 16)
    if code < 0x80:
        return f"{escape[1]}\\x{code:02x}"
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise BadRequest(f"grammar: {escape[0]} is no character")
    return escape[1] + chr(code)


def _reason(text: str) -> str:
    """Its first line, and the one on which a parser of expressions says what is wrong."""
    if "NoExtensionBias" in text:
        return "nothing can follow it"
    first, *others = text.splitlines() or ["no reason given"]
    more = next((line for line in others if line.startswith("error:")), "")
    return f"{first[:300]} {more[:200]}".rstrip()
