"""The verdict on a grammar: the same whatever came before, and soon, however hostile it is."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from cluster import grammars
from cluster.errors import BadRequest, NoRoom
from cluster.grammar_bounds import MOST_NESTED, check_bounds
from cluster.grammars import Following, Grammars
from cluster.request import Grammar
from tests.cluster.fake_engine import MODEL, TOKENIZER

SOON_S = 5.0  # of the processor; the slowest takes under one


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def ebnf(text: str) -> Grammar:
    return Grammar(kind="ebnf", text=text)


def schema(tree: object) -> Grammar:
    return Grammar(kind="json_schema", text=tree if isinstance(tree, str) else json.dumps(tree))


GOOD = [
    regex("[a-z]{2,5}"),
    regex("^(|.*)$"),
    ebnf('root ::= "yes" | no\nno ::= "n" [o0]+'),
    ebnf('start: "yes" | no\nno: /n[o0]+/'),
    schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    schema(
        {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    ),
]
BAD = [
    (regex("["), "unclosed|parse"),
    (regex("(?<=a)b"), "look"),
    (regex("()"), "empty text"),
    (regex("[a&&b]"), "no text"),
    (ebnf('root ::= "a"\nroot ::= "b"'), "'root' is there twice"),
    (ebnf('start: "a"\nstart: "b"'), "duplicate rule"),
    (ebnf("root ::= nope"), "nope"),
    (ebnf("what is this"), "grammar: "),
    (ebnf('root ::= "\\ud800"'), "no character"),
    (schema({"type": "nonsense"}), "nonsense"),
    (schema({"$ref": "#/nope"}), "nope"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (schema("{"), "not JSON"),
    (schema("[]"), "object"),
]
HOSTILE = [
    regex("((a{1000}){1000}){1000}"),
    regex("a{99999999999}"),
    regex("a" * 9000),
    regex("(" * 4000 + "a" + ")" * 4000),
    ebnf("root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
    ebnf("start: " + "(" * 20 + '"a"' + ")~1..100" * 20),
    ebnf('start: "a" | %json {"type": "integer", "multipleOf": 999983}'),
    schema('{"items":' * 3000 + "{}" + "}" * 3000),
    schema({"type": "integer", "multipleOf": 999_983}),
    schema({"type": "string", "pattern": "((x{500}){500}){500}"}),
    schema({"patternProperties": {"^((x{500}){500})$": {}}}),
    schema({"const": "a" * 100_000}),
    schema({"properties": {f"p{n}": {"type": "integer"} for n in range(3000)}}),
    schema({"allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}$"} for n in range(3, 15)]}),
]


def verdict(judge: Grammars, grammar: Grammar) -> str:
    """Why not; empty if it compiles."""
    try:
        judge.compile(grammar)
    except BadRequest as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("grammar", GOOD, ids=lambda one: one.text[:30])
def test_a_good_grammar_compiles(grammar: Grammar) -> None:
    assert verdict(Grammars(MODEL), grammar) == ""


@pytest.mark.parametrize(("grammar", "why"), BAD, ids=lambda one: getattr(one, "text", "")[:30])
def test_a_bad_grammar_is_refused_with_a_reason(grammar: Grammar, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        Grammars(MODEL).compile(grammar)


def test_the_verdict_does_not_depend_on_what_came_before() -> None:
    everything = [*GOOD, *(grammar for grammar, _ in BAD)]
    alone = [verdict(Grammars(MODEL), grammar) for grammar in everything]
    judge = Grammars(MODEL)
    assert [verdict(judge, grammar) for grammar in everything] == alone
    assert [verdict(judge, grammar) for grammar in everything] == alone  # as it is remembered
    judge = Grammars(MODEL)
    assert [verdict(judge, grammar) for grammar in reversed(everything)] == alone[::-1]


@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda one: one.text[:30])
def test_a_hostile_grammar_is_refused_soon(grammar: Grammar) -> None:
    began = time.thread_time()  # it is compiled in this thread, and others may use the machine
    assert verdict(Grammars(MODEL), grammar).startswith("grammar: ")
    assert time.thread_time() - began < SOON_S


@pytest.mark.parametrize(
    "text",
    ["(a{70}){70}", "(a{5000})+", "a{1000000}", "(a{3}b{4}){400}", r"\((a{90}\){90}", "[{]{9}{9}"],
)
def test_what_repeats_much_but_not_too_much_is_within_the_bounds(text: str) -> None:
    check_bounds(regex(text))


@pytest.mark.parametrize(
    "text", ["(a{71}){71}", "(b|(a{2,80} ){1,80})", "a{100}{100}", "(a{,99}){99}"]
)
def test_what_repeats_too_much_is_not(text: str) -> None:
    with pytest.raises(BadRequest, match=f"at most {MOST_NESTED}"):
        check_bounds(regex(text))


def followed(grammar: Grammar, text: str) -> Following:
    following = Grammars(MODEL).compile(grammar).follow()
    following.feed(TOKENIZER.encode(text))
    return following


def ids(mask: bytearray) -> set[int]:
    return {
        8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1
    }


def test_a_mask_has_what_may_come_and_says_whether_the_text_is_whole() -> None:
    digits = regex("[0-9]{1,2}")
    mask, whole = followed(digits, "").mask()
    assert not whole
    texts = {TOKENIZER.token_bytes(one) for one in ids(mask)}
    assert {b"0", b"9"} <= texts
    assert all(text.isdigit() and len(text) <= 2 for text in texts)
    mask, whole = followed(digits, "7").mask()
    assert whole
    assert all(len(TOKENIZER.token_bytes(one)) == 1 for one in ids(mask))
    mask, whole = followed(digits, "77").mask()
    assert (ids(mask), whole) == (set(), True)


@pytest.mark.parametrize(
    ("expression", "text", "may"),
    [
        (r"\d", "7", True),
        (r"\d", "\u0662", False),  # a digit in some versions of some libraries
        (r"[\d.]+", "7.7", True),
        (r"[\d.]", "\u0662", False),
        (r"[]\d]", "]", True),
        (r"[]\d]", "\u0662", False),
        (r"[^\d]", "\u0662", False),
        (r"[^\d]", "x", True),
        (r"[a^]\d", "^7", True),
        (r"[[:alpha:]]\d", "b7", True),
        (r"[^a]\d", "b\u0662", False),
        (r"\\d", "\\d", True),
        (r"\[\d", "[7", True),
        (r"\D", "\u0662", False),
    ],
)
def test_digits_are_those_that_every_library_knows(expression: str, text: str, may: bool) -> None:
    following = Grammars(MODEL).compile(regex(expression)).follow()
    if may:
        following.feed(TOKENIZER.encode(text))
        assert following.mask()[1]
    else:
        with pytest.raises(BadRequest, match="does not follow"):
            following.feed(TOKENIZER.encode(text))


@pytest.mark.parametrize(
    "character_class",
    [
        '[^"]',
        r'[^"\\\\]',
        r"[^a-z\n\"\\\\]",
        r"[\x00-\x1f]",
        r"[\x{0}-\x{1f} !#]",
        r"[\x00-\x7f&&[^\"\\\\]]",
        r'[^\w"]',
        "[^/]",
        ".",
        "[^]a]",
        r"\W",
        r"\S",
        r"[\w\s]",
    ],
)
def test_a_string_has_no_escape_that_its_pattern_leaves_out(character_class: str) -> None:
    compiled = Grammars(MODEL).compile(
        schema({"type": "string", "pattern": f"^{character_class}$"})
    )
    plain = {"[^/]", ".", "[^]a]", r"\W", r"\S"}
    for escaped in (r'"\""', r'"\\"'):
        following = compiled.follow()
        if character_class in plain:
            following.feed(TOKENIZER.encode(escaped))
            assert following.mask()[1]
        else:
            with pytest.raises(BadRequest, match="does not follow"):
                following.feed(TOKENIZER.encode(escaped))


def test_a_text_that_does_not_follow_is_an_error() -> None:
    with pytest.raises(BadRequest, match="does not follow"):
        followed(regex("[0-9]+"), "x")


def test_escapes_of_ebnf_mean_their_characters() -> None:
    grammar = ebnf(r'root ::= "\u00e9" [\u00e0-\u00ff] "\u0041"')
    _, whole = followed(grammar, "\u00e9\u00f0A").mask()
    assert whole


def test_followings_of_one_grammar_are_apart() -> None:
    compiled = Grammars(MODEL).compile(regex("ab"))
    first, second = compiled.follow(), compiled.follow()
    first.feed(TOKENIZER.encode("a"))
    assert first.mask() != second.mask()


def test_without_a_tokenizer_a_grammar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no tokenizer"):
        Grammars(tmp_path).compile(regex("a"))


def test_a_panic_of_the_library_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException): ...

    def panicking(grammar: Grammar) -> grammars.Compiled:
        raise Panic("index out of bounds")

    judge = Grammars(MODEL)
    monkeypatch.setattr(judge, "_build", panicking)
    for _ in range(2):
        with pytest.raises(BadRequest, match="index out of bounds"):
            judge.compile(regex("a"))


async def test_equal_grammars_are_compiled_once_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge, compiled_in = Grammars(MODEL), list[str]()
    build = judge._build

    def counted(grammar: Grammar) -> grammars.Compiled:
        compiled_in.append(threading.current_thread().name)
        return build(grammar)

    monkeypatch.setattr(judge, "_build", counted)
    await asyncio.gather(*(judge.check(regex("x[0-9]")) for _ in range(8)))
    await judge.check(None)
    assert len(compiled_in) == 1
    assert compiled_in[0].startswith("grammar")


async def test_too_many_that_wait_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, go_on = Grammars(MODEL), threading.Event()
    build = judge._build

    def held(grammar: Grammar) -> grammars.Compiled:
        assert go_on.wait(20)
        return build(grammar)

    monkeypatch.setattr(judge, "_build", held)
    waiting = [
        asyncio.create_task(judge.check(regex(f"x{n}"))) for n in range(grammars.MOST_WAITING)
    ]
    await asyncio.sleep(0)
    with pytest.raises(NoRoom):
        await judge.check(regex("one more"))
    go_on.set()
    await asyncio.gather(*waiting)
