"""Are there GPUs where the configuration wants them, and does state move between processes?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cluster.config import ClusterConfig
from cluster.doctor.finding import Finding, Level
from cluster.doctor.probe import probe
from cluster.errors import StartupError

SLOW = 0.05  # of memcpy in the same run; CMA reaches 0.3 and more, TCP on loopback 0.1


def check_gpus(config: ClusterConfig, limit_s: float) -> Finding:
    try:
        seen = probe("kernels.devices", limit_s=limit_s)
    except StartupError as error:
        return Finding("GPUs", "fail", f"torch does not start: {error}", "reinstall torch")
    wanted = any(pool.gpus for pool in (config.prefill, config.decode))
    return judge_gpus(seen, wanted=wanted, files=os.path.exists("/proc/driver/nvidia/version"))


def judge_gpus(seen: Mapping[str, Any], *, wanted: bool, files: bool) -> Finding:
    """`seen` as kernels/devices.py prints it; `files`: the NVIDIA driver is loaded."""
    devices = seen["devices"]
    if devices:
        memory = min(one["bytes"] for one in devices) / 1e9
        names = sorted({one["name"] for one in devices})
        built = f"torch {seen['torch']}"
        return Finding(
            "GPUs", "ok", f"{len(devices)} x {', '.join(names)}, {memory:.0f} GB, {built}"
        )
    if files and seen["cuda"] is None:
        return Finding(
            "GPUs",
            "fail" if wanted else "warn",
            f"the driver is loaded, but torch {seen['torch']} is built without CUDA",
            "install a CUDA build of torch: pip's default index has one",
        )
    if wanted:
        return Finding(
            "GPUs",
            "warn",
            "the configuration asks for GPUs and torch sees none here",
            "right for a head node without GPUs; on a GPU node look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES",
        )
    return Finding("GPUs", "ok", "none, and the configuration asks for none")


def check_transfer_path(config: ClusterConfig, limit_s: float) -> Finding:
    """Between two processes of this machine, under the variables that ranks would have."""
    host = config.wire.host
    loopback = host == "localhost" or host.startswith("127.")
    try:
        found = probe(
            "kv_transfer.path_check",
            limit_s=limit_s,
            variables={"UCX_NET_DEVICES": "lo"} if loopback else {},
        )
    except StartupError as error:
        return Finding(
            "transfer path",
            "fail",
            f"no bytes move between two processes: {error}",
            "UCX_LOG_LEVEL=info python -m kv_transfer.path_check shows what UCX tries; unset "
            "UCX_* variables first",
        )
    return judge_transfer_path(found, config.transfer.path)


def judge_transfer_path(found: Mapping[str, Any], chosen: str) -> Finding:
    """`found` as kv_transfer/path_check.py prints it, `chosen` as transfer.path."""
    direct = found["direct"]
    if chosen == "packed" or (chosen == "auto" and direct["kind"] == "host"):
        why = "transfer.path is packed" if chosen == "packed" else "between CPUs"
        way, fault = f"pairs take {found['path']}: {why}", False
    elif "why" in direct:
        way, fault = f"pairs take {found['path']}, not direct: {direct['why']}", True
    else:
        rate = f"{direct['gb_per_s']:.1f} GB/s"
        way, fault = f"pairs of this machine go direct by {direct['path']}, {rate}", False
    packed = _judge_packed(found)
    if fault:
        hint = "a container needs SYS_PTRACE, GPUs one IPC namespace; packed works without"
        level: Level = "fail" if chosen == "direct" else "warn"
        return Finding("transfer path", level, f"{way}; {packed.what}", hint)
    return Finding("transfer path", packed.level, f"{way}; {packed.what}", packed.next)


def _judge_packed(found: Mapping[str, Any]) -> Finding:
    ratio = found["gb_per_s"] / found["memcpy_gb_per_s"]
    what = (
        f"{found['path']}, DRAM: {found['bytes'] / 1e6:.0f} MB at {found['gb_per_s']:.1f} GB/s, "
        f"{ratio:.2f} of memcpy; backends {', '.join(found['backends'])}"
    )
    if ratio < SLOW:
        return Finding(
            "transfer path",
            "warn",
            what,
            "slow: a container without CAP_SYS_PTRACE has no CMA, and a set UCX_TLS may leave it "
            "out",
        )
    return Finding("transfer path", "ok", what)
