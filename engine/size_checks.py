"""Sizes of a rank that cannot be with its model. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import ClusterConfig, EngineSection
from cluster.messages import Role
from model.spec import ModelSpec
from model.state import StateField


def check_sizes(
    role: Role,
    config: ClusterConfig,
    sizes: EngineSection,
    spec: ModelSpec,
    fields: Sequence[StateField],
) -> None:
    """Raises ValueError for the first that cannot be; `fields` are the model's request state."""
    if sizes.max_length > spec.max_position_embeddings:
        raise ValueError(
            f"{role}.engine.max_length is {sizes.max_length}, but the model has "
            f"{spec.max_position_embeddings} positions"
        )
    widest = max(fields, key=lambda field: field.row_bytes)
    if widest.row_bytes > config.transfer.cell_bytes:
        raise ValueError(
            f"transfer.cell_bytes is {config.transfer.cell_bytes}, but one row of "
            f"{widest.name} has {widest.row_bytes} bytes"
        )
    kept, least = config.model.kept, spec.sliding_window + spec.dspark_block_size
    if 0 < kept < least:
        raise ValueError(
            f"model.keep_tokens is {kept}; a window of {spec.sliding_window} and a draft of "
            f"{spec.dspark_block_size} to take back need {least}"
        )
