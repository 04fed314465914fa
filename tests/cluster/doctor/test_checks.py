"""Each check judges from values: here are the values."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from cluster.config import setting_names
from cluster.doctor.abstract_sockets import abstract_sockets, guard_name, guarded_ports
from cluster.doctor.devices import judge_gpus, judge_transfer_path
from cluster.doctor.finding import Finding
from cluster.doctor.leftovers import judge_guards, judge_head_folders, judge_keys
from cluster.doctor.machine import (
    Space,
    check_http_port,
    judge_clocks,
    judge_limits,
    judge_shm,
)
from cluster.doctor.names import check_names, judge_names
from cluster.doctor.variables import judge_allocator, judge_ucx
from cluster.doctor.variables import judge_names as judge_variables
from cluster.doctor.versions import judge_package, judge_python, version_checks, wanted

ENDLESS = resource.RLIM_INFINITY


def levels(*findings: Finding) -> list[str]:
    for finding in findings:
        assert finding.what
        assert bool(finding.next) == (finding.level != "ok"), finding
    return [finding.level for finding in findings]


# ------------------------------------------------------------------ versions and names


def test_a_python_outside_the_range_fails() -> None:
    assert levels(
        *(judge_python(f"3.{minor}.1", ">=3.11,<3.13") for minor in (10, 11, 12, 13))
    ) == [
        "fail",
        "ok",
        "ok",
        "fail",
    ]


def test_a_package_is_missing_too_old_or_right_whatever_its_local_build() -> None:
    needed = Requirement("torch>=2.11,<2.15")
    found = [None, "2.10.0", "2.13.0+cpu", "2.14.0a1", "2.15.0"]
    judged = levels(*(judge_package("torch", one, needed) for one in found))
    assert judged == ["fail", "fail", "ok", "ok", "fail"]
    assert "torch<2.15,>=2.11" in judge_package("torch", None, needed).next


def test_ranges_are_those_of_pyproject_and_this_installation_is_within() -> None:
    python, needed = wanted()
    assert python == ">=3.11,<3.13"
    assert {"ray", "torch", "nixl"} <= set(needed)
    assert {check.run().level for check in version_checks()} == {"ok"}


def test_hugging_faces_kernels_is_a_clash_whichever_comes_first() -> None:
    ours, root = Path("/r/kernels"), Path("/r")
    foreign = Path("/site-packages/kernels")
    first = judge_names({"kernels": ours}, {"kernels": ["kernels", "tandem_serve"]}, root)
    behind = judge_names({"kernels": foreign}, {"kernels": ["kernels"]}, root)
    alone = judge_names({"kernels": ours}, {"kernels": ["tandem-serve"]}, root)
    gone = judge_names({"kernels": None}, {}, root)
    assert levels(first, behind, alone, gone) == ["fail", "fail", "ok", "fail"]
    assert "kernels is installed by kernels too" in first.what
    assert str(foreign) in behind.what


def test_the_names_of_this_checkout_lead_to_it() -> None:
    assert levels(check_names()) == ["ok"]


# ------------------------------------------------------------------ the machine


def test_small_shared_memory_warns_and_hardly_any_fails() -> None:
    total = 64 << 20
    free = [2 << 30, 512 << 20, 64 << 20]
    assert levels(*(judge_shm(Space(total, one)) for one in free)) == ["ok", "warn", "fail"]


def test_few_files_fail_and_locked_memory_matters_with_rdma_only() -> None:
    assert levels(
        judge_limits(ENDLESS, ENDLESS, rdma=True),
        judge_limits(65536, 8 << 20, rdma=False),
        judge_limits(65536, 8 << 20, rdma=True),
        judge_limits(4096, ENDLESS, rdma=False),
        judge_limits(256, ENDLESS, rdma=False),
    ) == ["ok", "ok", "fail", "warn", "fail"]


class Clocks:
    """Two clocks and a sleep that moves them, each by its own step."""

    def __init__(self, monotonic: float, wall: float, start: float = 1_800_000_000.0) -> None:
        self.steps = (monotonic, wall)
        self.times = [100.0, start]

    def judge(self) -> Finding:
        return judge_clocks(lambda: self.times[0], lambda: self.times[1], self.sleep)

    def sleep(self, _seconds: float) -> None:
        self.times = [time + step for time, step in zip(self.times, self.steps, strict=True)]


def test_clocks_go_together_or_something_is_wrong() -> None:
    assert levels(
        Clocks(0.2, 0.2001).judge(),
        Clocks(0.2, 3.2).judge(),  # stepped forward
        Clocks(0.2, -1.0).judge(),  # and back
        Clocks(0.0, 0.2).judge(),
        Clocks(0.2, 0.2, start=3600.0).judge(),  # never set since 1970
    ) == ["ok", "fail", "fail", "fail", "fail"]


def test_a_taken_port_fails_unless_a_tandem_cluster_guards_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert levels(check_http_port("127.0.0.1", port)) == ["fail"]
        with socket.socket(socket.AF_UNIX) as guard:
            guard.bind("\0" + guard_name(port))
            guard.listen()
            assert port in guarded_ports()
            assert levels(check_http_port("127.0.0.1", port)) == ["ok"]
    assert levels(check_http_port("127.0.0.1", port)) == ["ok"]


def test_abstract_sockets_are_read_from_the_kernels_table(tmp_path: Path) -> None:
    table = tmp_path / "unix"
    table.write_text(
        "Num RefCount Protocol Flags Type St Inode Path\n"
        "0: 00000002 00000000 00010000 0001 01 123 @tandem-http-8100\n"
        "0: 00000002 00000000 00010000 0001 01 124 /run/x.sock\n"
        "0: 00000003 00000000 00000000 0001 03 125\n"
    )
    assert abstract_sockets(table) == {"tandem-http-8100"}
    assert abstract_sockets(tmp_path / "none") == set()


# ------------------------------------------------------------------ devices


def test_gpus_are_missed_only_where_they_are_wanted() -> None:
    none: dict[str, Any] = {"torch": "2.13.0", "cuda": "13.0", "devices": []}
    cpu_build: dict[str, Any] = {"torch": "2.13.0+cpu", "cuda": None, "devices": []}
    two = none | {"devices": [{"name": "NVIDIA H200", "bytes": 150e9}] * 2}
    assert levels(
        judge_gpus(none, wanted=False, files=False),
        judge_gpus(none, wanted=True, files=False),
        judge_gpus(two, wanted=True, files=True),
        judge_gpus(cpu_build, wanted=True, files=True),
        judge_gpus(cpu_build, wanted=False, files=True),
    ) == ["ok", "warn", "ok", "fail", "warn"]
    assert "2 x NVIDIA H200, 150 GB" in judge_gpus(two, wanted=True, files=True).what


PACKED = {
    "path": "nixl/UCX",
    "backends": ["UCX"],
    "bytes": 16 << 20,
    "gb_per_s": 12.0,
    "memcpy_gb_per_s": 20.0,
}


NVLINK = {"kind": "nvlink", "path": "nvlink/cuda_ipc", "gb_per_s": 280.0}
HOST = {"kind": "host", "path": "host/cma", "gb_per_s": 4.0}
REFUSED = {"kind": "nvlink", "why": "cuda:0 cannot map memory of process 7"}


def test_a_path_far_below_memcpy_is_told() -> None:
    well = judge_transfer_path(PACKED | {"direct": NVLINK}, "auto")
    slow = judge_transfer_path(PACKED | {"direct": NVLINK, "gb_per_s": 0.5}, "auto")
    assert levels(well, slow) == ["ok", "warn"]
    assert "12.0 GB/s, 0.60 of memcpy" in well.what


@pytest.mark.parametrize(
    ("direct", "chosen", "level", "said"),
    [
        (NVLINK, "auto", "ok", "go direct by nvlink/cuda_ipc, 280.0 GB/s"),
        (NVLINK, "packed", "ok", "take nixl/UCX: transfer.path is packed"),
        (HOST, "auto", "ok", "take nixl/UCX: between CPUs"),
        (HOST, "direct", "ok", "go direct by host/cma, 4.0 GB/s"),
        (REFUSED, "auto", "warn", "not direct: cuda:0 cannot map memory"),
        (REFUSED, "direct", "fail", "not direct: cuda:0 cannot map memory"),
        (REFUSED, "packed", "ok", "take nixl/UCX: transfer.path is packed"),
    ],
)
def test_which_path_a_pair_would_take_is_told_and_why_it_is_not_the_direct_one(
    direct: dict[str, object], chosen: str, level: str, said: str
) -> None:
    found = judge_transfer_path(PACKED | {"direct": direct}, chosen)
    assert found.level == level
    assert said in found.what


# ------------------------------------------------------------------ variables


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_fail_where_state_is_on_a_gpu(name: str) -> None:
    set_ = {name: "max_split_size_mb:128, expandable_segments:True"}
    assert levels(judge_allocator(set_, gpus=True), judge_allocator(set_, gpus=False)) == [
        "fail",
        "warn",
    ]
    off = {name: "expandable_segments:False"}
    assert levels(judge_allocator(off, gpus=True), judge_allocator({}, gpus=True)) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("text", "on_cpu", "on_gpu"),
    [
        ("", "ok", "ok"),
        ("all", "ok", "ok"),
        ("cma,posix,tcp,self", "ok", "fail"),
        ("cuda_copy,cuda_ipc,cma,tcp", "ok", "ok"),
        ("rc,cuda,tcp", "ok", "ok"),
        ("shm,self", "fail", "fail"),
        ("tcp", "warn", "fail"),
        ("tcp,self", "warn", "fail"),
        ("^tcp", "fail", "fail"),
        ("^cuda_copy", "ok", "fail"),
        ("^rc", "ok", "ok"),
    ],
)
def test_transport_lists_of_ucx(text: str, on_cpu: str, on_gpu: str) -> None:
    found = [judge_ucx({"UCX_TLS": text}, gpus=gpus) for gpus in (False, True)]
    assert levels(*found) == [on_cpu, on_gpu]


def test_variables_without_effect_warn() -> None:
    assert levels(
        judge_variables({"TANDEM_URL": "x"}, setting_names()),
        judge_variables({"DEEPINFER_XGRAMMAR_DEBUG": "1"}, setting_names()),
    ) == ["ok", "warn"]


# ------------------------------------------------------------------ leftovers


def test_a_guard_without_a_listener_warns() -> None:
    assert levels(judge_guards({}), judge_guards({8100: True})) == ["ok", "ok"]
    stale = judge_guards({8100: True, 8200: False})
    assert levels(stale) == ["warn"]
    assert "8200" in stale.what
    assert "8100" not in stale.what


def test_folders_of_living_heads_are_left_alone() -> None:
    living, dead = Path("/tmp/tandem-ray-a"), Path("/tmp/tandem-ray-b")
    words = {"raylet", f"--temp-dir={living}"}
    assert levels(judge_head_folders([living], words)) == ["ok"]
    found = judge_head_folders([living, dead], words)
    assert levels(found) == ["warn"]
    assert str(dead) in found.what
    assert str(living) not in found.what
    many = judge_head_folders([dead / str(number) for number in range(9)], words)
    assert "and 4 more" in many.what


def test_keys_of_an_application_that_is_gone_warn_with_the_command_that_removes_them() -> None:
    keys = ["tandem/secret", "tandem/router", "old/secret"]
    assert levels(judge_keys(keys, ["tandem", "old"])) == ["ok"]
    found = judge_keys(keys, ["tandem"])
    assert levels(found) == ["warn"]
    assert found.next == "tandem down --name old"
