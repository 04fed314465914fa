"""Images over HTTP: the field `images` of a completion, over a fake engine."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from cluster.api.app import create_app
from cluster.api.text import load_tokenizer
from cluster.config import ClusterConfig, parse_config
from cluster.pictures import read_pictures
from tests.cluster.fake_engine import FakeEngine, app_over, client_of
from tests.cluster.fakes import until
from tests.pictures import IMAGE, MODELS, data_url, file, read

PICTURE = data_url(file(84, 84))
OTHER = data_url(file(126, 84, form="JPEG"), "image/jpeg")
PROMPT = [7, IMAGE, 8, IMAGE, 9]
CONFIG = parse_config({"model": {"path": str(MODELS / "tiny")}, "http": {"max_concurrent": 4}})
URL = "/v1/completions"


def with_images(**settings: int) -> ClusterConfig:
    return CONFIG.model_copy(update={"images": CONFIG.images.model_copy(update=settings)})


async def post(engine: FakeEngine, config: ClusterConfig = CONFIG, **body: Any) -> httpx.Response:
    async with client_of(app_over(engine, config)) as client:
        return await client.post(URL, json={"max_tokens": 4, "temperature": 0} | body)


async def test_images_reach_the_engine_in_their_places_and_count_as_prompt() -> None:
    engine = FakeEngine((5, 6))
    answer = await post(engine, prompt=PROMPT, images=[PICTURE, OTHER])
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    assert request.token_ids == [7, *[IMAGE] * 8, 8, *[IMAGE] * 10, 9]
    expected = read(file(84, 84), file(126, 84, form="JPEG"))
    assert request.images == (expected[0].at(1), expected[1].at(10))
    assert answer.json()["usage"]["prompt_tokens"] == 21


async def test_a_prompt_that_is_long_enough_already_stays_and_choices_share_the_pixels() -> None:
    engine = FakeEngine((5, 6))
    whole = [7, *[IMAGE] * 8, 8]
    answer = await post(engine, prompt=[whole], images=[PICTURE], n=2, echo=True)
    assert answer.status_code == 200, answer.text
    one, two = engine.requests
    assert one.token_ids == whole
    assert one.images[0].pixels is two.images[0].pixels


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"prompt": [1, 2]}, "prompt", "has 0 image tokens (id 2045) for 1 images"),
        ({"prompt": [IMAGE, IMAGE]}, "prompt", "has 2 image tokens"),
        ({"prompt": [IMAGE], "images": []}, "prompt", "there are no images"),
        ({"prompt": "text"}, "images", "one prompt of token ids"),
        ({"prompt": [[IMAGE], [IMAGE]]}, "images", "one prompt of token ids"),
        ({"images": PICTURE}, "images", "list"),
        ({"images": [3]}, "images.0", "string"),
        ({"images": ["https://example.com/cat.png"]}, "images.0", "addresses are not fetched"),
        ({"images": ["data:image/png;base64,%%%"]}, "images.0", "is not base64"),
        ({"images": [data_url(b"GIF89a")]}, "images.0", "is none of PNG, JPEG, WEBP"),
        ({"prompt": PROMPT, "images": [PICTURE, PICTURE[:-400]]}, "images.1", ""),
        ({"images": [PICTURE] * 9, "prompt": [IMAGE] * 9}, "images.8", "may have 8 images"),
    ],
)
async def test_what_is_wrong_is_a_400_that_names_it(
    body: dict[str, Any], param: str, why: str
) -> None:
    engine = FakeEngine((5,))
    answer = await post(engine, CONFIG, **({"prompt": [IMAGE], "images": [PICTURE]} | body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert why in error["message"]
    assert not engine.requests


async def test_a_prompt_that_its_images_make_too_long_is_refused_with_the_numbers() -> None:
    short = {"engine": {"max_length": 16}}
    config = parse_config(
        {"model": {"path": str(MODELS / "tiny")}, "prefill": short, "decode": short}
    )
    answer = await post(FakeEngine((5,)), config, prompt=[IMAGE] * 2, images=[PICTURE, OTHER])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "18 tokens" in answer.json()["error"]["message"]


async def test_a_model_of_text_says_so() -> None:
    mini = MODELS / "mini"
    config = parse_config({"model": {"path": str(mini)}})
    app = create_app(FakeEngine((5,)), load_tokenizer(mini), config)
    async with client_of(app) as client:
        answer = await client.post(URL, json={"prompt": [5], "images": [PICTURE]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "images")
    assert error["message"] == "images: the model that is served here takes none"


async def test_pixels_that_are_held_are_bounded_and_come_back() -> None:
    engine = FakeEngine((5, 6))
    engine.hold_at = lambda index: index == 1
    app = app_over(engine, with_images(held_bytes=40_000))
    body = {"prompt": [IMAGE], "images": [PICTURE], "max_tokens": 2, "stream": True}
    async with client_of(app) as client:
        first = asyncio.create_task(client.post(URL, json=body))
        await engine.begun.wait()
        second = await client.post(URL, json=body)
        assert second.status_code == 429
        assert "images.held_bytes" in second.json()["error"]["message"]
        engine.go_on.set()
        assert (await first).status_code == 200
        assert (await client.post(URL, json=body)).status_code == 200


async def test_a_slow_picture_holds_up_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    real = read_pictures

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(20)
        return real(*arguments)

    monkeypatch.setattr("cluster.api.image_field.read_pictures", slow)
    engine = FakeEngine((5, 6))
    async with client_of(app_over(engine, CONFIG)) as client:
        waiting = asyncio.create_task(
            client.post(URL, json={"prompt": [IMAGE], "images": [PICTURE]})
        )
        await until(entered.is_set)
        long = "x" * 6000
        assert (await client.post(URL, json={"prompt": "Hi"})).status_code == 200
        other = await client.post(URL, json={"prompt": "Hi", "user": long})
        assert other.status_code == 200
        go_on.set()
        assert (await waiting).status_code == 200


async def test_the_openapi_document_has_the_field() -> None:
    async with client_of(app_over(FakeEngine())) as client:
        schema = (await client.get("/openapi.json")).json()
    field = schema["components"]["schemas"]["CompletionBody"]["properties"]["images"]
    assert field["items"] == {"type": "string"}
    assert "base64" in field["description"]
