"""What our modules log, in a process of the cluster: to its stderr, which Ray keeps and shows."""

from __future__ import annotations

import logging

from cluster.config import LogSection

PACKAGES = ("cluster", "prefill_worker", "decode_worker", "engine", "kv_transfer", "model")
FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


def log_as(section: LogSection) -> None:
    """From now on; may be called again."""
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(section.level.upper())
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter(FORMAT))
            logger.addHandler(handler)
            logger.propagate = False
