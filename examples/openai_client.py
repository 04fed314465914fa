"""The request of every example here, through OpenAI's own client: whole, then as a stream.

    pip install openai
    TANDEM_URL=http://127.0.0.1:8100 python examples/openai_client.py

TANDEM_API_KEY is sent where the server asks for keys.
"""

from __future__ import annotations

import os
import sys

from openai import APIError, OpenAI

PROMPT = "def add(a, b):"
MAX_TOKENS = 16


def main() -> None:
    url = os.environ.get("TANDEM_URL", "http://127.0.0.1:8100")
    key = os.environ.get("TANDEM_API_KEY", "none is needed")
    try:
        ask(f"{url}/v1", key)
    except APIError as error:
        sys.exit(f"openai_client: {url}: {error} (`tandem up --local` starts a cluster)")


def ask(url: str, key: str) -> None:
    with OpenAI(base_url=url, api_key=key) as client:
        model = next(iter(client.models.list())).id
        whole = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0
        )
        print(whole.choices[0].text)
        stream = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0, stream=True
        )
        for chunk in stream:
            print(chunk.choices[0].text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
