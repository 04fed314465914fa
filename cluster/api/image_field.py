"""The field `images` of a body: data URLs to pictures, and pictures to their places in the prompt.

Decoding takes a thread's time; whoever calls this is in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.api.output_format import BadField
from cluster.config import ImagesSection
from cluster.errors import BadRequest
from cluster.image import Image
from cluster.image_prompt import BadPrompt, place
from cluster.image_rules import ImageRules
from cluster.pictures import BadPicture, check_number, read_data_url, read_pictures


class ImageField:
    """`rules` are None where the model takes no images."""

    def __init__(self, rules: ImageRules | None, limits: ImagesSection) -> None:
        self._rules = rules
        self._limits = limits

    def placed(
        self, token_ids: Sequence[int], urls: Sequence[str]
    ) -> tuple[Sequence[int], tuple[Image, ...]]:
        """The prompt's ids with all positions of its images, and the images. BadField for what
        cannot be."""
        if not urls:
            self._check_none(token_ids)
            return token_ids, ()
        if self._rules is None:
            raise BadField("images", "the model that is served here takes none")
        try:
            check_number(len(urls), self._limits)
            pictures = read_pictures(self._files(urls), self._rules, self._limits)
            return place(token_ids, pictures)
        except BadPicture as error:
            raise BadField(f"images.{error.number}", error.why) from error
        except BadPrompt as error:
            raise BadField("prompt", str(error)) from error

    def _files(self, urls: Sequence[str]) -> list[bytes]:
        files = []
        for number, url in enumerate(urls):
            try:
                files.append(read_data_url(url))
            except BadRequest as error:
                raise BadPicture(number, str(error)) from error
        return files

    def _check_none(self, token_ids: Sequence[int]) -> None:
        """A forgotten picture would be an answer about nothing."""
        if self._rules is None:
            return
        token = self._rules.image_token_id
        found = sum(one == token for one in token_ids)
        if found:
            raise BadField(
                "prompt", f"has {found} image tokens (id {token}), and there are no images"
            )
