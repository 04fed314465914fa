"""build.sh looks at the machine first, and says in one line what is wrong with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _build(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "build.sh"), *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, **environ},
        capture_output=True,
        text=True,
    )


def test_a_cpu_passes_and_a_look_installs_nothing() -> None:
    done = _build("--check", DEEPINFER_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first == "build: accelerator cpu"
    assert last == "build: nothing was installed (--check)"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"DEEPINFER_ACCELERATOR": "tpu"}, "'tpu' is none of nvidia, ascend, cpu"),
        ({"DEEPINFER_ACCELERATOR": "nvidia", "PATH": ""}, "there is no nvidia-smi"),
        ({"DEEPINFER_ACCELERATOR": "ascend"}, "there is no /dev/davinci_manager"),
        ({"DEEPINFER_ACCELERATOR": "cpu", "PYTHON": "/none"}, "there is no /none"),
    ],
)
def test_what_is_wrong_is_one_line(environ: dict[str, str], said: str, tmp_path: Path) -> None:
    if os.path.exists("/dev/davinci_manager"):
        pytest.skip("this machine has an Ascend NPU")
    if environ.get("PATH") == "":
        for name in ("bash", "dirname", "env"):
            (tmp_path / name).symlink_to(f"/usr/bin/{name}")
        environ = environ | {"PATH": str(tmp_path)}
    done = _build("--check", **environ)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("build failed: ")
    assert said in line


def test_an_argument_that_is_none_is_refused() -> None:
    assert _build("--chek").stderr == "build failed: unknown argument --chek; there is --check\n"
