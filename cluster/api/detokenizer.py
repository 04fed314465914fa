"""Token ids to text, piece by piece: no piece ever ends inside a character.

Joined, the pieces are exactly the decoding of all ids at once. Knows nothing of HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from cluster.api.text import Tokenizer


class Detokenizer:
    """The text of one answer as it grows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; the rest waits for the next call."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def finish(self) -> str:
        """What a cut in the middle of a character leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
