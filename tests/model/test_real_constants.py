"""Constants that follow from the published config, against published values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.engram import CompressedIds, engram_hashes
from model.spec import ModelSpec
from model.state import state_fields

MODELS = Path(__file__).parents[2] / "deploy" / "models"
REAL = ModelSpec.load(MODELS / "deepseek-v41-flash")
TINY = ModelSpec.load(MODELS / "tiny")

MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
PRIMES = {
    1: [
        [16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183],
        [16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321],
        [16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463],
    ],
    14: [
        [16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627],
        [16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769],
        [16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889],
    ],
}


@pytest.mark.parametrize("layer", [1, 14])
def test_engram_constants(layer: int) -> None:
    hashing = engram_hashes(REAL)[layer]
    assert hashing.multipliers_N.tolist() == MULTIPLIERS[layer]
    assert hashing.primes_Oh.tolist() == PRIMES[layer]
    rows = REAL.engram_num_embeddings[REAL.engram_layer_ids.index(layer)]
    assert int(hashing.primes_Oh.sum()) == rows
    assert int(hashing.offsets_Oh[-1, -1] + hashing.primes_Oh[-1, -1]) == rows


@pytest.mark.parametrize(
    ("layer", "ids", "expected"),
    [
        (1, [1000, 2000, 3000, 4000], [2490620, 122161697, 141932547, 264700880, 375488643]),
        (14, [1000, 2000, 3000, 4000], [13209604, 120577284, 136676902, 262006302, 372276798]),
        (1, [99091, 2, 2, 2], [2008568, 125647891, 134138602, 264495124, 370110214]),
        (14, [99091, 2, 2, 2], [10569928, 118275352, 141663274, 264810417, 372021888]),
    ],
)
def test_engram_rows_of_known_ids(layer: int, ids: list[int], expected: list[int]) -> None:
    rows = engram_hashes(REAL)[layer].rows(torch.tensor([ids]))
    assert rows[0, [0, 7, 8, 16, 23]].tolist() == expected


def test_engram_constants_of_the_tiny_model() -> None:
    hashes = engram_hashes(TINY)
    assert hashes[1].primes_Oh.tolist() == [[503, 509], [521, 523], [541, 547]]
    assert hashes[3].primes_Oh.tolist() == [[557, 563], [569, 571], [577, 587]]
    assert tuple(int(h.primes_Oh.sum()) for h in hashes.values()) == TINY.engram_num_embeddings


def test_a_compressed_vocabulary_needs_its_map_and_dead_positions_are_padding() -> None:
    with pytest.raises(ValueError, match="give token_map"):
        CompressedIds(REAL, None)
    with pytest.raises(ValueError, match="token_map has 3 ids"):
        CompressedIds(REAL, torch.arange(3))
    token_map = torch.arange(REAL.vocab_size) // 2
    compressed = CompressedIds(REAL, token_map)
    assert compressed(torch.tensor([[10, 11, -1]])).tolist() == [[5, 5, 1]]
    assert CompressedIds(TINY, None)(torch.tensor([7, -1])).tolist() == [7, 2]


def test_rope_frequencies() -> None:
    yarn, plain = REAL.rope_frequencies(1), REAL.rope_frequencies(0)
    known = {
        0: 1.0,
        1: 0.687656022,
        15: 0.00363553858,
        16: 0.002265625,
        20: 2.96977778e-4,
        24: 1.953125e-5,
        25: 5.37231267e-6,
        31: 5.68052904e-7,
    }
    for pair, value in known.items():
        assert yarn[pair] == pytest.approx(value, rel=1e-8)
    assert [plain[i] for i in (1, 16, 31)] == pytest.approx(
        [0.749894209, 0.01, 1.33352143e-4], rel=1e-8
    )
    assert REAL.rope_frequencies(2) == yarn


@pytest.mark.parametrize(
    ("length", "total"),
    [
        (1_024, 3_817_472),
        (8_192, 10_196_992),
        (32_768, 32_069_632),
        (131_072, 119_560_192),
        (1_048_576, 936_138_752),
        (131_071, 119_560_192 - 356 - 3 * 356 + 12_288),  # no last rows, but the open pair
    ],
)
def test_bytes_of_request_state(length: int, total: int) -> None:
    fields = state_fields(REAL)
    found = sum(
        len(field.growth.rows(length)) * len(field.layers) * field.row_bytes for field in fields
    )
    assert found == total
