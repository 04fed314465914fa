"""An offline engine on a small model: its answers, and what is wrong with a request."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from cluster.errors import StartupError
from offline import LLM, SamplingParams
from offline.request_output import LEAST_LOGPROB
from tests.offline.greedy_loop import greedy
from tests.pictures import file, picture_request
from tests.plain_loop import straight
from tests.tiny import make_prompt

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tandem-mini", max_model_len=256, max_num_seqs=4, accelerator="cpu") as llm:
        yield llm


def test_answers_come_in_the_order_of_their_prompts_and_as_texts(llm: LLM) -> None:
    texts = llm.generate(["alpha", "beta", "alpha"], GREEDY, use_tqdm=False)
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]
    assert llm.generate("beta", GREEDY, use_tqdm=False) == [texts[1]]
    assert llm.generate([], GREEDY) == []


def test_each_token_is_told_with_its_log_probability(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=3, top_logprobs=2, prompt_logprobs=True, ignore_eos=True
    )
    (outputs,) = llm.outputs([make_prompt(20)], params, use_tqdm=False)
    assert [one.num_output_tokens for one in outputs] == [1, 2, 3]
    assert [one.finish_reason for one in outputs] == ["", "", "length"]
    assert [one.finished for one in outputs] == [False, False, True]
    for one in outputs:
        assert one.top_token_ids[0] == one.token_id
        assert one.token_logprobs == one.top_logprobs[0] > LEAST_LOGPROB
    assert len(outputs[0].prompt_logprobs) == 19
    assert not outputs[1].prompt_logprobs


def test_a_seed_repeats_an_answer_and_none_does_not(llm: LLM) -> None:
    def drawn(seed: int | None) -> list[int]:
        params = SamplingParams(max_tokens=8, seq_seed=seed, temperature=2.0)
        return [one.token_id for one in llm.outputs([[7, 8]], params, use_tqdm=False)[0]]

    assert drawn(3) == drawn(3) != drawn(4)
    assert drawn(None) != drawn(None)


def test_more_prompts_than_slots_are_all_answered(llm: LLM) -> None:
    prompts = [make_prompt(3 + n, n) for n in range(6)]
    answers = llm.outputs(prompts, GREEDY, use_tqdm=False)
    for prompt, outputs in zip(prompts, answers, strict=True):
        assert tuple(one.token_id for one in outputs) == greedy(prompt, 5)


def test_one_that_cannot_be_answered_does_not_harm_the_others(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    broken = SamplingParams(so_args={"schema_type": "regex", "schema": "["})
    with caplog.at_level(logging.WARNING, "offline"):
        bad, long, cut, good = llm.outputs(
            [make_prompt(5), make_prompt(256), make_prompt(254), make_prompt(5)],
            [broken, GREEDY, GREEDY, GREEDY],
            use_tqdm=False,
        )
    assert bad[0].finish_reason.startswith("grammar: ")
    assert [one.finish_reason for one in long] == ["prompt_length_exceeded"]
    assert (len(cut), cut[-1].finish_reason) == (2, "length")
    assert len(good) == 5
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "give prompts or prompt_token_ids"),
        ({"prompts": ["a"], "prompt_token_ids": [[1], [2]]}, "1 prompts and 2 lists"),
        ({"prompts": ["a", ""]}, "prompt 1 is empty"),
        ({"prompt_token_ids": [[5], [5, 99999]]}, "prompt 1: token id 99999 is outside"),
        ({"prompt_token_ids": [[-1]]}, "token id -1"),
        ({"prompts": ["a", "b"], "sampling_params": [GREEDY]}, "1 sampling_params for 2 prompts"),
    ],
)
def test_prompts_that_cannot_be_are_refused_before_any_runs(
    llm: LLM, told: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        llm.generate(**told)  # type: ignore[arg-type]


def test_a_model_without_an_encoder_says_so_to_that_prompt_alone(llm: LLM) -> None:
    images = [None, {"image_bytes": [file(28, 28)]}]
    plain, shown = llm.outputs([[5, 6], [5, 2045, 6]], GREEDY, images, use_tqdm=False)
    assert len(plain) == 5
    assert "vision encoder" in shown[0].finish_reason


@pytest.mark.full
def test_an_image_is_seen_as_a_plain_loop_sees_it() -> None:
    picture, prompt = file(60, 40), [5, 2045, 6]
    request = picture_request(prompt, picture, max_tokens=5)
    with LLM(
        "tandem-tiny", load_format="dummy", max_model_len=512, max_num_seqs=2, accelerator="cpu"
    ) as llm:
        images = {"image_bytes": [picture], "image_sizes": [(60, 40)]}
        (outputs,) = llm.outputs([prompt], GREEDY, images, use_tqdm=False)
    assert tuple(one.token_id for one in outputs) == straight(request)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([{}, {}], "of 2 prompts where there are 1"),
        ({"image_urls": []}, "'image_urls' is no key"),
        ({"image_bytes": ["x.png"]}, "image_bytes must be bytes"),
    ],
)
def test_images_that_cannot_be_are_refused(llm: LLM, images: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        llm.outputs([[5]], GREEDY, images)  # type: ignore[arg-type]


def test_schemas_are_followed(llm: LLM) -> None:
    params = SamplingParams(so_args={"schema_type": "ebnf", "schema": 'root ::= "a" [0-9]{3} "z"'})
    (text,) = llm.generate("x", params, use_tqdm=False)
    assert isinstance(text, str)
    assert text[0] == "a"
    assert text[1:4].isdigit()
    assert text[4:] == "z"


def test_progress_is_shown_unless_it_is_not_wanted(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_an_engine_that_cannot_be_leaves_nothing_behind() -> None:
    with pytest.raises(StartupError, match="has no checkpoint"):
        LLM("tandem-tiny")
    with pytest.raises(StartupError, match='need ranks as Ray actors: ranks_as="ray"'):
        LLM("tandem-tiny", load_format="dummy", machines=2, accelerator="cpu")
