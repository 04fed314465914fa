"""How many token ids have a spelling. The embedding may have more rows: padding, to a round size.

Knows nothing of text.
"""

from __future__ import annotations

import json
from pathlib import Path


def spelled_ids(folder: str | Path) -> int | None:
    """Ids from this one on are spelled by nothing in `folder`/tokenizer.json; None if it is absent.

    Raises ValueError for a file that is no tokenizer.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        added = (token["id"] for token in told.get("added_tokens") or ())
        return 1 + int(max(*told["model"]["vocab"].values(), *added))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a tokenizer.json: {error}") from error
