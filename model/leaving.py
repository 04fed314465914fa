"""Which rows of a forward go on past the cut layer; the others have done all that is needed.

After it a row reaches others through windows only. Knows no weights.
"""

from __future__ import annotations

import numpy as np

from model.options import ModelOptions
from model.rows import Ints, Rows
from model.spec import ModelSpec


def going_on(rows: Rows, logit_rows: Ints, spec: ModelSpec, options: ModelOptions) -> Ints:
    """Rows that must pass the cut layer, ascending; `logit_rows` are those whose logits are wanted.

    One layer's newest window rows need as many of the layer before, and W - 1 more for each
    layer in between; logits need W - 1 more a layer too. Nothing else of a row is kept.
    """
    if options.truncation == "mask":
        return np.arange(rows.count)
    if options.truncation == "compact":
        return rows.above_clip
    window, layers = spec.sliding_window, spec.num_hidden_layers
    after = layers - 1 - spec.cut_layer
    first_R = rows.first_R + rows.counts_R
    np.minimum.at(first_R, rows.requests_T[logit_rows], logit_rows)
    for_logits_R = rows.first_R + rows.counts_R - first_R + after * (window - 1)
    for_state = window + rows.rollback + max(after - 1, 0) * (window - 1)
    return rows.last(np.maximum(for_logits_R, for_state))


def check_cut(spec: ModelSpec) -> None:
    """After the cut only some rows exist, so nothing there may need the others.

    Raises ValueError for a config where something does.
    """
    cut = spec.cut_layer
    if max(spec.engram_layer_ids, default=0) > cut:
        raise ValueError(f"prefill cannot be truncated at layer {cut}: Engram follows it")
    if min(spec.dspark_target_layer_ids) <= cut or spec.candidate_source_layer_id < cut:
        raise ValueError(f"prefill cannot be truncated at layer {cut}: later layers look before it")
