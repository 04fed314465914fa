"""Token ids to text, piece by piece: no piece ever ends inside a character.

Joined, the pieces are exactly the decoding of all ids at once. Knows nothing of HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from cluster.api.text import Tokenizer


class Detokenizer:
    """The text of one answer as it grows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._whole = True  # nothing waits for its other half

    def feed(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete; the rest waits for the next call."""
        raw = b"".join(map(self._bytes_of, token_ids))
        if self._whole:
            try:
                return raw.decode()  # nearly always, and at a third of the decoder's cost
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(raw)
        self._whole = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """What a cut in the middle of a character leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
