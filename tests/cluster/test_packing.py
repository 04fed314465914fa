"""Whether bundles fit nodes, and what is said when they do not."""

from __future__ import annotations

import pytest

from cluster.errors import StartupError
from cluster.packing import Bundle, Domain, Node, choose_domain, first_unplaced


def node(name: str, *, gpus: float, cpus: float = 8, **labels: str) -> Node:
    has = {"CPU": cpus, "GPU": gpus}
    return Node(
        name, free=has, total=has, labels={k.replace("_", "/"): v for k, v in labels.items()}
    )


def rank(owner: str, *, gpus: float = 1) -> Bundle:
    return Bundle(owner, {"CPU": 1, "GPU": gpus})


def test_bundles_that_fit_need_no_domain_where_nodes_name_none() -> None:
    nodes = [node("a", gpus=1), node("b", gpus=2)]
    assert choose_domain(nodes, [rank("p"), rank("d", gpus=2)]) is None


def test_large_bundles_are_placed_first() -> None:
    nodes = [node("a", gpus=2), node("b", gpus=1)]
    bundles = [rank("small"), rank("large", gpus=2)]
    assert first_unplaced(nodes, bundles) is None


def test_a_refusal_says_which_bundle_lacks_what_and_what_there_is() -> None:
    free = {"CPU": 8.0, "GPU": 0.0}
    nodes = [node("a", gpus=1), Node("b", free=free, total={"CPU": 8, "GPU": 1})]
    with pytest.raises(StartupError) as refused:
        choose_domain(nodes, [rank("rank 0 of Prefill"), rank("rank 0 of Decode")])
    said = str(refused.value)
    assert "rank 0 of Decode cannot be placed: its bundle needs CPU 1, GPU 1" in said
    assert "asks for CPU 2, GPU 2 in 2 bundles" in said
    assert "node a: CPU 8 free of 8, GPU 1 free of 1" in said
    assert "node b: CPU 8 free of 8, GPU 0 free of 1" in said
    assert "even when empty" not in said


def test_a_bundle_larger_than_any_node_is_called_so() -> None:
    with pytest.raises(StartupError, match="no node is large enough"):
        choose_domain([node("a", gpus=1), node("b", gpus=1)], [rank("d", gpus=2)])
    with pytest.raises(StartupError, match="no node"):
        choose_domain([], [rank("d")])


def test_one_domain_takes_both_pools_or_none_does() -> None:
    nodes = [
        node("a", gpus=1, tandem_domain="left"),
        node("b", gpus=1, tandem_domain="right"),
        node("c", gpus=1, tandem_domain="right"),
        node("d", gpus=4),  # outside any domain
    ]
    pair = [rank("p"), rank("d")]
    assert choose_domain(nodes, pair) == Domain("tandem/domain", "right")
    with pytest.raises(StartupError, match="no domain fits both pools"):
        choose_domain(nodes, [*pair, rank("d2")])


def test_the_domain_that_runs_already_is_kept() -> None:
    nodes = [node(value, gpus=2, tandem_domain=value) for value in ("x", "y", "z")]
    for value in ("x", "y", "z"):
        running = Domain("tandem/domain", value)
        assert choose_domain(nodes, [rank("p"), rank("d")], preferred=running) == running


def test_rays_own_label_counts_before_ours() -> None:
    label = "ray.io/gpu-domain"
    has = {"CPU": 8.0, "GPU": 2.0}
    nodes = [Node("a", has, has, {label: "nvl-1", "tandem/domain": "other"})]
    assert choose_domain(nodes, [rank("p")]) == Domain(label, "nvl-1")
