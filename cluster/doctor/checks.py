"""All checks there are, in the order in which they are made; quick ones first."""

from __future__ import annotations

import os
from functools import partial

from cluster import local_ray
from cluster.config import ClusterConfig, setting_names
from cluster.doctor import devices, leftovers, machine, names, variables
from cluster.doctor.finding import LIMIT_S, Check
from cluster.doctor.versions import version_checks

REPLY_S = 0.5  # earlier than the limit of a check, so that its own words are told


def checks(config: ClusterConfig, limit_s: float = LIMIT_S) -> list[Check]:
    """Of this machine, for this configuration; none needs a cluster that runs."""
    gpus = any(pool.gpus for pool in (config.prefill, config.decode))
    patience_s = max(limit_s - REPLY_S, limit_s / 2)
    ray_runs = "RAY_ADDRESS" in os.environ or local_ray.running() is not None
    return [
        *version_checks(),
        Check("import names", names.check_names),
        Check("variables", partial(variables.judge_names, os.environ, setting_names())),
        Check("allocator", partial(variables.judge_allocator, os.environ, gpus=gpus)),
        Check("UCX_TLS", partial(variables.judge_ucx, os.environ, gpus=gpus)),
        Check("HTTP port", partial(machine.check_http_port, config.http.host, config.http.port)),
        Check("Ray ports", partial(machine.check_ray_ports, ray_runs)),
        Check("/dev/shm", machine.check_shm),
        Check("limits", machine.check_limits),
        Check("clocks", machine.check_clocks),
        Check("guards", leftovers.check_guards),
        Check("Ray folders", leftovers.check_head_folders),
        Check("Ray keys", partial(leftovers.check_keys, patience_s, ray_runs=ray_runs)),
        Check("GPUs", partial(devices.check_gpus, config, patience_s)),
        Check("transfer path", partial(devices.check_transfer_path, config, patience_s)),
    ]
