"""Pictures take their places: one token for each, or all; and what must hold of the result."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.block_hash import block_hashes
from cluster.client import build_request
from cluster.errors import BadRequest
from cluster.image import check_images
from cluster.image_prompt import BadPrompt, place
from cluster.limits import NoEncoder, check_pictures
from cluster.membership import Roster
from cluster.messages import Load, Member, NoWorkers, Role, Route, Routed, pack_ids
from cluster.policy import choose
from tests.cluster.fakes import LOAD, endpoint
from tests.pictures import IMAGE, file, picture_request, read, rules

A, B = read(file(84, 84), file(126, 84))  # 8 and 10 positions


def test_one_token_for_each_becomes_all_that_it_takes() -> None:
    ids, images = place([7, IMAGE, 8, IMAGE, IMAGE, 9], [A, B, A])
    assert ids == [7, *[IMAGE] * 8, 8, *[IMAGE] * 18, 9]
    assert [(one.start, one.stop) for one in images] == [(1, 9), (10, 20), (20, 28)]
    assert [one.key for one in images] == [A.key, B.key, A.key]


def test_a_prompt_that_has_all_of_them_stays_as_it_is() -> None:
    whole, images = place([7, IMAGE, 8, IMAGE], [A, B])
    assert place(whole, [A, B]) == (whole, images)


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([1, 2], r"has 0 image tokens \(id 2045\) for 2 images; it needs one for each, or all 18"),
        ([IMAGE], "has 1 image tokens"),
        ([IMAGE] * 3, "has 3 image tokens"),
        ([*[IMAGE] * 7, 5, *[IMAGE] * 11], r"breaks the 8 image tokens of images\[0\] off"),
    ],
)
def test_any_other_is_refused_with_the_numbers(ids: list[int], why: str) -> None:
    with pytest.raises(BadPrompt, match=why):
        place(ids, [A, B])
    with pytest.raises(BadRequest, match="prompt: "):
        build_request(ids, images=[A, B])


def test_the_handle_places_them_too() -> None:
    request = build_request([7, IMAGE, 8], images=[A])
    assert request.token_ids == [7, *[IMAGE] * 8, 8]
    assert request.image_bytes == 84 * 84 * 3
    assert request.without_pixels().image_bytes == 0
    assert request.without_pixels().images[0].span == request.images[0].span
    assert request.resume_after([5]).images == request.images


def changed(**values: Any) -> tuple[Any, ...]:
    (image,) = place([7, IMAGE, 8], [A])[1]
    return (image.model_copy(update=values),)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"pixels": b"123"}, r"images\[0\]: 3 bytes are not"),
        ({"width": 80}, "is not in patches of 14"),
        ({"count": 9}, "take 8 positions, of at most 64; it has 9"),
        ({"start": 0}, "not every position from 0 to 7 has the image token 2045"),
        ({"start": 3}, "ends behind the prompt"),
        ({"width": 5460, "height": 14, "pixels": bytes(5460 * 14 * 3), "count": 133}, "at most 64"),
    ],
)
def test_what_a_rank_could_not_run_is_refused(values: dict[str, Any], why: str) -> None:
    prompt = pack_ids(place([7, IMAGE, 8], [A])[0])
    check_images(changed(), prompt, rules())
    with pytest.raises(BadRequest, match=why):
        check_images(changed(**values), prompt, rules())


def test_images_may_not_overlap() -> None:
    ids, images = place([IMAGE], [A])
    with pytest.raises(BadRequest, match=r"images\[1\]: it overlaps"):
        check_images([*images, *images], pack_ids(ids), rules())


def test_two_pictures_never_share_a_block_and_what_precedes_them_does() -> None:
    def names(*files: bytes) -> tuple[bytes, ...]:
        request = picture_request([*range(100, 120), IMAGE, *range(100, 130)], *files)
        spans = [image.span for image in request.images]
        return block_hashes(request.prompt, model="m", block_tokens=16, images=spans)

    one, same, other = names(file(84, 84)), names(file(84, 84)), names(file(84, 84, seed=1))
    assert one == same
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


# ------------------------------------------------------------------ who may run them

SEEING = LOAD.model_copy(update={"images": rules()})


def member(name: str, role: Role, load: Load) -> Member:
    return Member(endpoint=endpoint(name, role, name), load=load)


def pick(*members: Member, colocated: bool = False, local_tokens: int = 0) -> Routed | NoWorkers:
    route = Route(request_id="r", length=20, longest=40, images=True)
    return choose(
        Roster.of(members, now=0.0),
        route,
        colocated=colocated,
        local_tokens=local_tokens,
        retry_after_s=0.5,
    )


def test_images_go_to_ranks_with_an_encoder() -> None:
    blind, seeing = member("a", "prefill", LOAD), member("b", "prefill", SEEING)
    decode = member("d", "decode", LOAD)
    answer = pick(blind, seeing, decode)
    assert isinstance(answer, Routed)
    assert answer.prefill == seeing.endpoint
    assert answer.decode == decode.endpoint
    nobody = pick(blind, decode)
    assert isinstance(nobody, NoWorkers)
    assert "1 without a vision encoder" in nobody.message


def test_a_decode_rank_runs_a_prompt_with_images_only_if_it_has_one() -> None:
    prefill = member("p", "prefill", SEEING)
    blind, seeing = member("a", "decode", LOAD), member("b", "decode", SEEING)
    answer = pick(prefill, blind, local_tokens=100)
    assert isinstance(answer, Routed)
    assert answer.prefill == prefill.endpoint
    answer = pick(prefill, blind, seeing, local_tokens=100)
    assert answer == Routed(prefill=None, decode=seeing.endpoint)
    assert pick(blind, seeing, colocated=True) == Routed(prefill=None, decode=seeing.endpoint)
    assert isinstance(pick(blind, colocated=True), NoWorkers)


def test_images_that_nobody_could_run_are_a_bad_request() -> None:
    request = picture_request([IMAGE], file(84, 84))
    blind, seeing = member("a", "decode", LOAD), member("p", "prefill", SEEING)
    check_pictures(request, [blind, seeing], "prefill")
    check_pictures(request, [seeing], "decode")  # nobody is known yet
    with pytest.raises(NoEncoder, match="no decode rank has a vision encoder") as refusal:
        check_pictures(request, [blind, seeing], "decode")
    assert refusal.value.param == "images"
