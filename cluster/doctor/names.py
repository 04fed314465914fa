"""Do our import names lead to our folders? They are plain words, and others have used them too.

The best known clash: Hugging Face's package `kernels` installs a top-level folder of that name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from cluster.doctor.finding import Finding
from cluster.doctor.versions import DISTRIBUTION, ROOT

FOLDERS = (
    "cluster",
    "prefill_worker",
    "decode_worker",
    "engine",
    "kv_transfer",
    "model",
    "kernels",
    "offline",
)


def check_names() -> Finding:
    owners = metadata.packages_distributions()
    return judge_names(
        {name: _origin(name) for name in FOLDERS},
        {name: owners.get(name, []) for name in FOLDERS},
    )


def judge_names(
    origins: Mapping[str, Path | None], owners: Mapping[str, Sequence[str]], root: Path = ROOT
) -> Finding:
    """`origins`: where each import name leads now. `owners`: distributions that install it.

    A foreign owner is a failure even while ours comes first on the path: elsewhere, in a Ray
    worker say, it may not.
    """
    wrong, shared = [], []
    for name, origin in origins.items():
        others = sorted({one for one in owners.get(name, ()) if not _ours(one)})
        if origin is None:
            wrong.append(f"{name} is not found")
        elif origin != root / name:
            wrong.append(f"{name} is {origin}")
        if others:
            shared.append(f"{name} is installed by {', '.join(others)} too")
    if wrong or shared:
        return Finding(
            "import names",
            "fail",
            "; ".join(wrong + shared),
            "pip uninstall what brings the foreign folder, or give Tandem an environment of its "
            "own",
        )
    return Finding("import names", "ok", f"all {len(origins)} lead to {root}")


def _origin(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    return Path(places[0]).resolve() if places else Path(spec.origin or "").resolve()


def _ours(distribution: str) -> bool:
    return distribution.lower().replace("_", "-") == DISTRIBUTION
