"""What went wrong in the field with requests over HTTP, against real ranks: prefill and decode.

Numbers are those of the catalogue of field cases. Every answer is asked for whole, streamed and
with our own client, which must agree.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from typing import Any

from tests.cluster.fake_engine import TOKENIZER
from tests.e2e.front import Front, Scripted, front_of
from tests.tiny import TinyCluster, load_tiny, make_prompt, tiny_config

PROMPT = make_prompt(20)
V = TOKENIZER.vocab_size


# ------------------------------------------------------------------ FC-21


async def test_fc21_no_parameter_leaks_into_the_prefill_leg() -> None:
    """The prefill rank makes one token; minimum, stops and usage are the whole answer's."""
    stops = list(range(3, 2000, 2))  # half of all ids: only min_tokens keeps the answer going
    base: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 32, "min_tokens": 8, "ignore_eos": None}
    variations: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"n": 2, "temperature": 1.0},
        {"logprobs": 5},
        {"echo": True},
        {"stop": ["never to be seen"]},
        {"max_tokens": 8},
        {"repetition_penalty": 1.2, "presence_penalty": 1.0, "temperature": 0.8},
        {"allowed_token_ids": list(range(3, 103)), "bad_words": ["never"]},
    ]
    async with TinyCluster() as cluster, front_of(cluster) as front:
        for more in variations:
            told: dict[str, Any] = {"stop_token_ids": stops, "return_token_ids": True}
            body = base | told | more
            apart = await front.ask(**body)
            alone = await front.whole(**body, colocated=True)
            assert apart["choices"] == alone["choices"], more
            assert apart["usage"] == alone["usage"]
            for choice in apart["choices"]:
                assert 8 <= len(choice["token_ids"]) <= body["max_tokens"]
                assert not set(stops).intersection(choice["token_ids"][:7])
        assert cluster.prefill[0].health().steps > 0
        assert await cluster.settled()


# ------------------------------------------------------------------ FC-23


async def test_fc23_logprobs_of_the_first_token_and_of_an_echoed_prompt() -> None:
    async with (
        TinyCluster(model=load_tiny()) as cluster,
        front_of(cluster) as front,
    ):
        for more, entries, prompt in (
            ({"logprobs": 5}, 4, 0),
            ({"echo": True, "logprobs": 1}, 24, 20),
        ):
            body = {"prompt": PROMPT, "max_tokens": 4, **more}
            apart = (await front.ask(**body))["choices"][0]["logprobs"]
            alone = (await front.ask(**body, colocated=True))["choices"][0]["logprobs"]
            assert {name: len(values) for name, values in apart.items()} == dict.fromkeys(
                apart, entries
            )
            nulls = [place for place, one in enumerate(apart["token_logprobs"]) if one is None]
            assert nulls == ([0] if prompt else [])
            for ours, theirs in zip(apart["token_logprobs"], alone["token_logprobs"], strict=True):
                assert ours == theirs or math.isclose(ours, theirs, abs_tol=1e-3)
            assert apart["tokens"] == alone["tokens"]
        refused = await front.refused(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
        assert refused["error"]["param"] == "max_tokens"


# ------------------------------------------------------------------ FC-26


async def test_fc26_stop_strings_that_span_tokens() -> None:
    body = {"prompt": PROMPT, "max_tokens": 64}
    async with TinyCluster() as cluster, front_of(cluster) as front:
        plain = await front.ask(**body, return_token_ids=True)
        text, ids = plain["choices"][0]["text"], plain["choices"][0]["token_ids"]
        assert len(ids) == 64
        # inside one token, over two whole ones, into the next
        place = next(
            place
            for place in range(20, 60)
            if all(len(TOKENIZER.decode([one])) > 2 for one in ids[place : place + 4])
            and "\ufffd" not in TOKENIZER.decode(ids[place : place + 4])
        )
        start = len(TOKENIZER.decode(ids[:place])) + 1
        end = len(TOKENIZER.decode(ids[: place + 3])) + 1
        stop = text[start:end]
        before = text.split(stop)[0]
        for stops in ([stop], [stop, "never"], [*(f"never {n}" for n in range(999)), stop]):
            choice = (await front.ask(**body, stop=stops))["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (before, "stop")
        almost = text[-5:] + "\x00"
        choice = (await front.ask(**body, stop=[almost]))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert (await front.refused(prompt=PROMPT, stop=[""]))["error"]["param"] == "stop"
        assert await cluster.settled()


# ------------------------------------------------------------------ FC-28

SPLIT = "\U0001fae0\u9f9c\u00e9\U0001f1e9\U0001f1ea"


async def test_fc28_characters_that_are_split_over_tokens() -> None:
    script = TOKENIZER.encode(SPLIT)
    assert len(script) > len(SPLIT), "no character of it is one token"
    model = Scripted(script, len(PROMPT))
    async with TinyCluster(model=model) as cluster, front_of(cluster) as front:
        whole = await front.ask(prompt=[PROMPT] * 4, max_tokens=len(script))
        assert [one["text"] for one in whole["choices"]] == [SPLIT] * 4
        for length in range(1, len(script)):
            cut = (await front.ask(prompt=PROMPT, max_tokens=length))["choices"][0]["text"]
            assert cut == TOKENIZER.decode(script[:length])  # U+FFFD for half a character
            assert cut.rstrip("\ufffd") == SPLIT[: len(cut.rstrip("\ufffd"))]


# ------------------------------------------------------------------ FC-34

ODD_VALUES = [
    *(("temperature", value, 400) for value in ("NaN", "Infinity", "-Infinity", "1e999", "-1")),
    *(("temperature", value, 400) for value in ("1e308", '"0.7"', "true", "[]")),
    *(("temperature", value, 200) for value in ("1e-9", "null", "5e-324", "0", "100")),
    *(("top_p", value, 400) for value in ("0", "1.0001", "NaN", "-0.0", '"1"')),
    *(("top_p", value, 200) for value in ("5e-324", "1", "1.0", "null")),
    *(("top_k", value, 400) for value in ("-2", "1e12", "1000000000000", "1.5", "true")),
    *(("top_k", value, 200) for value in ("0", "-1", "2147483647", "null")),
    *(
        (f"{which}_penalty", value, 400)
        for which in ("presence", "frequency")
        for value in ("2.1", "-2.1", "NaN", "1e999", "true")
    ),
    *(("repetition_penalty", value, 400) for value in ("0", "-1", "NaN", "1e999", "100.1")),
    *(("repetition_penalty", value, 200) for value in ("5e-324", "1e-300", "100")),
    *(("min_p", value, 400) for value in ("-0.1", "1.1", "NaN")),
    *(("seed", value, 400) for value in ("-1", str(2**63), str(2**64), "NaN", "1.5", "true")),
    *(("seed", value, 200) for value in ("0", str(2**63 - 1), "null")),
]


async def normal_answers(front: Front) -> list[str]:
    """Three greedy requests that run side by side."""
    answers = await asyncio.gather(
        *(
            front.http.post(
                "/v1/completions",
                json={
                    "prompt": make_prompt(9, seed),
                    "max_tokens": 8,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            )
            for seed in range(3)
        )
    )
    return [answer.json()["choices"][0]["text"] for answer in answers]


async def test_fc34_non_finite_negative_and_extreme_values() -> None:
    async with TinyCluster() as cluster, front_of(cluster) as front:
        expected = await normal_answers(front)
        greedy = (await front.ask(prompt=PROMPT))["choices"]
        for field, value, status in ODD_VALUES:
            beside = asyncio.create_task(normal_answers(front))
            for stream in ("false", "true"):
                rest = f'"prompt": {PROMPT}, "max_tokens": 4, "stream": {stream}'
                told = await front.raw(f'{{"{field}": {value}, {rest}}}')
                assert told["status"] == status, (field, value, told)
                if status == 400 and not value.startswith(("NaN", "Inf", "-Inf")):
                    assert told["error"]["param"].startswith(field), told
            assert await beside == expected, (field, value)
        assert (await front.ask(prompt=PROMPT, temperature=1e-9))["choices"] == greedy
        assert all(rank.health().alive for rank in cluster.ranks)
        assert await cluster.settled()


# ------------------------------------------------------------------ FC-35


async def test_fc35_ids_that_are_none_and_lists_that_contradict_each_other() -> None:
    (five,) = (word for word in [TOKENIZER.decode([70])] if TOKENIZER.encode(word) == [70])
    refused: list[dict[str, Any]] = [
        {"logit_bias": {str(V): 5}},
        {"logit_bias": {"-1": 5}},
        {"logit_bias": {"abc": 1}},
        {"logit_bias": {"5": 1000}},
        {"stop_token_ids": [V], "ignore_eos": False},
        {"bad_words": [""]},
        {"bad_words": [f"word {n}" for n in range(10_000)]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [V]},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": [70], "bad_words": [five]},
    ]
    async with TinyCluster() as cluster, front_of(cluster) as front:
        expected = await normal_answers(front)
        for body in refused:
            beside = asyncio.create_task(normal_answers(front))
            told = await front.refused(prompt=PROMPT, **body)
            assert told["error"]["param"].partition(".")[0] in body, told
            assert await beside == expected
        taken: list[tuple[dict[str, Any], set[int]]] = [
            ({"bad_words": ["\u0001"]}, set(range(V))),
            ({"bad_words": [f"word {n}" for n in range(512)]}, set(range(V))),
            ({"allowed_token_ids": [70]}, {70}),
            ({"allowed_token_ids": [70, 71], "bad_words": [five]}, {71}),
            ({"logit_bias": {"70": 100}, "allowed_token_ids": [71]}, {71}),
        ]
        for body, possible in taken:
            for temperature in (0.0, 1.0):
                answer = await front.ask(
                    prompt=PROMPT, return_token_ids=True, temperature=temperature, **body
                )
                assert possible.issuperset(answer["choices"][0]["token_ids"]), body
        assert await normal_answers(front) == expected
        assert await cluster.settled()


async def test_fc35_padding_of_the_vocabulary_is_never_said(tmp_path: Any) -> None:
    """The tokenizer spells fewer ids than the model has logits: on both ranks and on one."""
    folder = tiny_config().model.path
    with open(f"{folder}/tokenizer.json", encoding="utf-8") as file:
        tree = json.load(file)
    size = 1500
    vocab = {piece: id for piece, id in tree["model"]["vocab"].items() if id < size}
    merges = [
        pair
        for pair in tree["model"]["merges"]
        if "".join(pair if isinstance(pair, list) else pair.split(" ")) in vocab
    ]
    tree["model"] |= {"vocab": vocab, "merges": merges}
    tree["added_tokens"] = [one for one in tree["added_tokens"] if one["id"] < size]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    shutil.copy(f"{folder}/config.json", tmp_path)
    config = tiny_config(model={"path": str(tmp_path)})
    async with TinyCluster(config=config) as cluster, front_of(cluster) as front:
        for colocated in (False, True):
            for more in (
                {},
                {"temperature": 100.0, "top_p": 0.999, "repetition_penalty": 1.5},
            ):
                answer = await front.ask(
                    prompt=PROMPT,
                    max_tokens=24,
                    return_token_ids=True,
                    colocated=colocated,
                    **more,
                )
                assert max(answer["choices"][0]["token_ids"]) < size
            # this front knows the whole vocabulary, so it lets ids of the padding pass
            biased = await front.ask(
                prompt=PROMPT,
                return_token_ids=True,
                colocated=colocated,
                logit_bias={str(size + 7): 100},
            )
            assert max(biased["choices"][0]["token_ids"]) < size
            only = await front.raw(
                json.dumps({"prompt": PROMPT, "allowed_token_ids": [size], "colocated": colocated})
            )
            assert only["status"] == 400
        assert await cluster.settled()
