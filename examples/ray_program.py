"""The request of every example here, from inside a Ray program: a task asks the cluster that runs
beside it, without HTTP.

    python examples/ray_program.py

Run it from the repository root, or install the package; RAY_ADDRESS says which Ray cluster.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster import local_ray
from cluster.api.text import load_tokenizer
from cluster.client import SyncClient
from cluster.config import load_config
from cluster.errors import ClusterError

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def add(a, b):"
MAX_TOKENS = 16


def complete(prompt: str, max_tokens: int) -> str:
    """Any task or actor can do this; it talks to the ranks directly."""
    config = load_config(ROOT / "deploy" / "configs" / "local.toml")
    tokenizer = load_tokenizer(ROOT / config.model.path)
    with SyncClient.from_ray(config.name, config) as client:
        deltas = client.generate(tokenizer.encode(prompt), max_tokens=max_tokens)
        return tokenizer.decode([token for delta in deltas for token in delta.token_ids])


def main() -> None:
    local_ray.prefer()  # the cluster of `tandem up --local`, unless RAY_ADDRESS names another
    import ray  # reads its settings when it is imported

    from cluster.application import connect

    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}  # where tasks find our code
    try:
        connect()  # ray.init() would do, and takes minutes to say that there is no cluster
        task = ray.remote(num_cpus=0, runtime_env=environment)(complete)
        print(ray.get(task.remote(PROMPT, MAX_TOKENS)))
    except ClusterError as error:  # of the task too, then with its traceback around it
        sys.exit(f"ray_program: {getattr(error, 'cause', error)}")


if __name__ == "__main__":
    main()
