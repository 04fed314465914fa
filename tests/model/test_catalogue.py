"""The list of tensors, and what it adds up to, are those of the published model."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.catalogue import catalogue
from model.census import Census, part_of, state_bytes, take_census
from model.spec import ModelSpec
from tests.model.oracle import oracle

MODELS = Path(__file__).parents[2] / "deploy" / "models"
REAL = ModelSpec.load(MODELS / "deepseek-v41-flash")
TINY = ModelSpec.load(MODELS / "tiny")


Stored = dict[str, tuple[str, tuple[int, ...]]]


def stored(spec: ModelSpec, *, vision: bool = True) -> Stored:
    tensors = catalogue(spec, vision)
    return {k: (*v,) for name, tensor in tensors.items() for k, v in tensor.stored(name).items()}


@pytest.fixture(scope="module")
def published() -> Stored:
    return stored(REAL)


@pytest.fixture(scope="module")
def census() -> Census:
    """Of the published model."""
    return take_census(REAL)


def test_the_census_of_the_published_checkpoint_comes_out_to_the_byte(census: Census) -> None:
    assert census.type_bytes == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }
    assert sum(census.part_bytes.values()) == 510_286_023_000
    assert census.tensors == {
        "backbone": 93_414,
        "engram_tables": 4,
        "drafter": 2_401,
        "vision": 266,
    }
    assert sum(census.tensors.values()) == 96_085
    assert census.parameters == {
        "backbone": 551_880_835_184,
        "engram_tables": 196_613_849_600,
        "drafter": 14_225_362_530,
        "vision": 485_268_480,
    }
    assert sum(census.parameters.values()) == 763_205_315_794
    assert census.expert_bytes == 18_800_640


def test_half_of_the_layers_are_active_in_prefill(census: Census) -> None:
    assert round(census.active.prefill / 1e9) == 8
    assert round(census.active.decode / 1e9) == 16


def test_the_census_of_the_tiny_model() -> None:
    census = take_census(TINY)
    assert sum(census.parameters.values()) == 25_591_102
    assert sum(census.tensors.values()) == 1_016
    assert sum(census.part_bytes.values()) == 24_641_200


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (129280, 5120)),
        ("layers.0.hc_ffn_fn", "F32", (24, 20480)),
        ("layers.5.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.39.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.39.attn.attn_sink", "F32", (64,)),
        ("layers.2.attn.compressor.wgate.weight", "BF16", (512, 5120)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.36.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280)),
        ("layers.7.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
        ("layers.7.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.7.ffn.shared_experts.w2.scale", "F8_E8M0", (160, 72)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.1.ffn.gate.bias_vl", "F32", (128,)),
        ("mtp.2.markov_head.head.weight", "BF16", (129280, 256)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("vision.patch_embed.proj.weight", "BF16", (1024, 588)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("image_newline", "BF16", (5120,)),
    ],
)
def test_published_names_have_their_types_and_shapes(
    published: Stored, name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    assert published[name] == (dtype, shape)


@pytest.mark.parametrize(
    ("ending", "layers"),
    [
        ("attn.compressor.wkv.weight", {2, 8, 14, 20}),
        ("attn.compressor.wgate.weight", {2, 8, 14}),
        ("attn.indexer.k_norm.weight", {2, 8, 14, 20}),
        ("attn.indexer.weights_proj.weight", {2, 8, 14, 20, 24, 28, 32, 36}),
        ("engram.q_weight", {1, 14}),
    ],
)
def test_sources_alone_have_compressors_indexers_and_tables(
    published: Stored, ending: str, layers: set[int]
) -> None:
    names = [name for name in published if name.startswith("layers.") and name.endswith(ending)]
    assert {int(name.split(".")[1]) for name in names} == layers


def test_without_vision_exactly_the_vision_group_is_left_out() -> None:
    left_out = stored(TINY).keys() - stored(TINY, vision=False).keys()
    assert left_out == {name for name in stored(TINY) if part_of(name) == "vision"}
    assert len(left_out) == take_census(TINY).tensors["vision"]


@pytest.mark.parametrize("spec", [REAL, TINY], ids=["real", "tiny"])
def test_the_reference_lists_the_same_tensors(spec: ModelSpec) -> None:
    reference = oracle("v41_checkpoint")
    tensors = reference.tensors(reference.Config.from_dict(dict(spec.raw)))
    expected = {k: v for name, tensor in tensors.items() for k, v in tensor.stored(name).items()}
    assert stored(spec) == expected


def test_request_state_has_its_published_size(census: Census) -> None:
    state = census.state
    assert state.per_token == 890
    assert state.windows == 2_906_112
    assert state.tail == 12_288
    assert state.row_bytes == {
        "compressed_r2": 288,
        "index_r2": 68,
        "tail": 4096,
        "compressed_r1": 288,
        "index_r1": 68,
        "window": 528,
        "draft_window": 528,
    }


@pytest.mark.parametrize(
    ("length", "total"),
    [
        (1_024, 3_817_472),
        (8_192, 10_196_992),
        (32_768, 32_069_632),
        (131_072, 119_560_192),
        (1_048_576, 936_138_752),
        (131_073, 119_560_192 + 356 + 12_288),  # one more row of layer 20, three open pairs
        (100, 100 * 890 + 100 * 43 * 528),  # windows that are not full
    ],
)
def test_a_handoff_weighs_what_the_published_table_says(length: int, total: int) -> None:
    assert state_bytes(REAL, length) == total
