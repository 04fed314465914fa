"""Text to token ids and back, from a model folder's tokenizer.json (byte-level BPE).

Plain text stays plain: a special spelling that a user types is encoded as the characters it is
made of, never as the special id. Knows nothing of chat templates and of the model itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from cluster.errors import StartupError


class Tokenizer:
    """The vocabulary of one model. `vocab_size` is the model's: ids at or above it are wrong.

    Ids from `size` on are padding, which no text uses."""

    def __init__(self, tokenizer: dict[str, Any], vocab_size: int) -> None:
        """`tokenizer` is the parsed tokenizer.json; StartupError if it is not byte-level."""
        if (tokenizer.get("decoder") or {}).get("type") != "ByteLevel":
            raise StartupError("tokenizer.json is not byte-level BPE: its decoder is not ByteLevel")
        added = tokenizer.get("added_tokens") or []
        plain = {**tokenizer, "added_tokens": []}
        self.vocab_size = vocab_size
        spelled = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in added)]
        self.size = min(vocab_size, max(spelled) + 1)
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self._bytes = [b""] * vocab_size
        byte_of = _byte_alphabet()
        for spelling, token_id in tokenizer["model"]["vocab"].items():
            if token_id < vocab_size and all(character in byte_of for character in spelling):
                self._bytes[token_id] = bytes(byte_of[character] for character in spelling)
        for token in added:
            if token["id"] < vocab_size:
                shown = "" if token["special"] else token["content"]
                self._bytes[token["id"]] = shown.encode()

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; nothing is added at either end."""
        # a batch of one: encode() would keep every other thread from running meanwhile
        (encoded,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: part of a character, perhaps; nothing if special."""
        return self._bytes[token_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """From tokenizer.json and config.json of a model folder; StartupError names what is wrong."""
    try:
        tokenizer = _read(Path(folder) / "tokenizer.json")
        config = _read(Path(folder) / "config.json")
        text_config = config.get("text_config", config)
        return Tokenizer(tokenizer, int(text_config["vocab_size"]))
    except (KeyError, TypeError) as error:
        raise StartupError(f"{folder}: tokenizer.json or config.json lacks {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    return parsed


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies, reversed.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are the code
    points from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(256 + index): byte for index, byte in enumerate(others)}
