"""Text to token ids and back: a Hugging Face tokenizer.json, byte-level BPE.

Text is only ever text here: a special token that somebody typed is encoded as the characters it
is made of. Special ids come from `special_ids`, put there by code that builds prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers

BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
PAD = "<\uff5c\u2581pad\u2581\uff5c>"
IMAGE = "<\uff5cdeepseek_image\uff5c>"


class Tokenizer:
    """`special_ids` are the ids of the added vocabulary by spelling."""

    def __init__(self, text: str) -> None:
        """`text` is the content of a tokenizer.json. Raises ValueError if it is not one."""
        try:
            settings = json.loads(text)
            added = {token["content"]: token["id"] for token in settings["added_tokens"]}
            pieces = {**settings["model"]["vocab"], **added}
            # Without added vocabulary the backend cannot find special tokens in a text.
            self._plain = tokenizers.Tokenizer.from_str(
                json.dumps({**settings, "added_tokens": []})
            )
        except Exception as error:  # the backend raises plain Exception
            raise ValueError(f"not a tokenizer.json: {error}") from error
        self.special_ids: Mapping[str, int] = added
        self.vocab_size = max(pieces.values()) + 1
        self._pieces = [""] * self.vocab_size
        for piece, token_id in pieces.items():
            self._pieces[token_id] = piece
        special = set(added.values())
        self._bytes = [
            piece.encode() if token_id in special else _piece_bytes(piece)
            for token_id, piece in enumerate(self._pieces)
        ]

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """From `folder`/tokenizer.json."""
        return cls((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))

    @property
    def bos_token_id(self) -> int:
        return self.special_ids[BOS]

    @property
    def eos_token_id(self) -> int:
        return self.special_ids[EOS]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, never special ones; decode gives the text back.

        Raises ValueError for a str that no UTF-8 text can hold (half a surrogate pair).
        """
        text.encode()  # the backend would raise TypeError
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token: often part of a character only."""
        return self._bytes[token_id]

    def piece(self, token_id: int) -> str:
        """A token as tokenizer.json spells it: each byte as one printable character."""
        return self._pieces[token_id]


def _byte_characters() -> dict[str, int]:
    """The byte that each character stands for in byte-level BPE.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_characters()


def _piece_bytes(piece: str) -> bytes:
    return bytes(_BYTES[character] for character in piece)
