"""Variables that are set wrongly: traps of UCX and of torch's allocator, and names nobody reads.

Judged is the environment of this process. Ranks have that of the `ray start` of their node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cluster.doctor.finding import Finding
from cluster.environment import remarks

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second is the newer name


def judge_allocator(environ: Mapping[str, str], *, gpus: bool) -> Finding:
    """Expandable segments are mapped piecewise: RDMA registers them and then moves by a slow way.

    Source: ai-dynamo/nixl#1754, transfers some 600 times slower and no word of it.
    """
    for name in ALLOCATOR:
        options = environ.get(name, "").lower().replace(" ", "").split(",")
        if "expandable_segments:true" in options:
            return Finding(
                "allocator",
                "fail" if gpus else "warn",
                f"{name} has expandable_segments:True: state on a GPU would move by a slow path",
                f"unset {name}, where Ray is started too",
            )
    return Finding("allocator", "ok", "torch's default segments")


def judge_ucx(environ: Mapping[str, str], *, gpus: bool) -> Finding:
    """A list without tcp has no way to notice a dead peer, and UCX refuses to start.

    A list without the CUDA transports reads GPU memory through the host, or not at all
    (ai-dynamo/nixl#1042).
    """
    text = environ.get("UCX_TLS", "")
    names = [one for one in text.lower().removeprefix("^").split(",") if one]
    if not names or names == ["all"]:
        return Finding("UCX_TLS", "ok", "UCX chooses" if not names else "all")
    if "all" in names:
        return Finding("UCX_TLS", "ok", text)
    excluded = text.startswith("^")
    if ("tcp" in names) == excluded:
        return Finding(
            "UCX_TLS",
            "fail",
            f"{text} leaves tcp out: NIXL does not start, for nothing else notices a dead peer",
            "unset UCX_TLS, or let it have tcp",
        )
    cuda = any(one in names for one in ("cuda", "cuda_copy"))
    if gpus and cuda == excluded:
        return Finding(
            "UCX_TLS",
            "fail",
            f"{text} leaves cuda_copy out: memory of a GPU cannot be registered or crashes",
            "unset UCX_TLS, or let it have cuda_copy and cuda_ipc",
        )
    if not excluded and set(names) <= {"tcp", "self"}:
        return Finding(
            "UCX_TLS",
            "warn",
            f"{text}: state moves by TCP alone, some ten times slower on one machine",
            "unset UCX_TLS",
        )
    return Finding("UCX_TLS", "ok", text)


def judge_names(environ: Mapping[str, str], settings: Collection[str]) -> Finding:
    """Our own variables and DeepInfer's: set, but without effect."""
    found = remarks(environ, settings)
    if found:
        return Finding("variables", "warn", "; ".join(found), "tandem env lists what is read")
    return Finding("variables", "ok", "none of ours is set in vain")
