"""Streams tokens from a running cluster through a Python handle, from a process of its own.

    python examples/client_handle.py [--prompt "def add(a, b):"] [--max-tokens 16]

Run it from the repository root, or install the package; RAY_ADDRESS says which Ray cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster import local_ray
from cluster.api.text import load_tokenizer
from cluster.client import Client
from cluster.config import load_config
from cluster.errors import ClusterError
from cluster.timeline import Timeline

ROOT = Path(__file__).resolve().parent.parent


async def stream(prompt: str, max_tokens: int) -> None:
    config = load_config(ROOT / "deploy" / "configs" / "local.toml")
    tokenizer = load_tokenizer(ROOT / config.model.path)
    timeline = Timeline()
    async with await Client.from_ray(config.name, config) as client:
        token_ids = tokenizer.encode(prompt)
        answer: list[int] = []
        async for delta in client.generate(token_ids, max_tokens=max_tokens, timeline=timeline):
            answer += delta.token_ids
            print(*delta.token_ids, end=" ", flush=True)
    print()
    print(tokenizer.decode(answer))
    print(timeline.summary())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt", default="def add(a, b):", help="(default: %(default)r)")
    parser.add_argument("--max-tokens", type=int, default=16, help="(default: %(default)s)")
    options = parser.parse_args()
    local_ray.prefer()  # the cluster of `tandem up --local`, unless RAY_ADDRESS names another
    from cluster.application import connect

    try:
        connect()
        asyncio.run(stream(options.prompt, options.max_tokens))
    except ClusterError as error:
        sys.exit(f"client_handle: {error}")


if __name__ == "__main__":
    main()
