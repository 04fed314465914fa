"""Which folder a name means, and what is said when there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.errors import StartupError
from offline.model_folder import SHIPPED, check_checkpoint, model_folder


def _model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_without_a_name_it_is_the_variable_and_else_the_shipped_one(tmp_path: Path) -> None:
    own = _model(tmp_path / "own")
    assert model_folder(None, {}) == SHIPPED["tandem-mini"]
    assert model_folder(None, {"DEEPINFER_HF_MODEL_DIR": str(own)}) == own


def test_a_name_that_is_given_is_not_overruled(tmp_path: Path) -> None:
    environ = {"DEEPINFER_HF_MODEL_DIR": str(_model(tmp_path / "own"))}
    assert model_folder("tandem-tiny", environ) == SHIPPED["tandem-tiny"]
    other = _model(tmp_path / "other")
    assert model_folder(str(other), environ) == other


def test_a_repository_is_found_in_the_cache_the_newest_snapshot_first(tmp_path: Path) -> None:
    snapshots = tmp_path / "hub" / "models--deepseek-ai--V" / "snapshots"
    for age, name in enumerate(("a", "b")):
        os.utime(_model(snapshots / name), (age, age))
    for environ in ({"HF_HOME": str(tmp_path)}, {"HF_HUB_CACHE": str(tmp_path / "hub")}):
        assert model_folder("deepseek-ai/V", environ) == snapshots / "b"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tandem-min", "^the model: 'tandem-min' is no folder, .*; did you mean tandem-mini[?]$"),
        ("deepseek-ai/V", "nor in Hugging Face's cache; download it there, or set DEEPINFER_HF_MO"),
        (str(Path(__file__).parent), "is a folder without config.json$"),
    ],
)
def test_a_name_that_means_nothing_is_one_line(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=said):
        model_folder(name, {"HF_HOME": str(tmp_path)})


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(StartupError, match=r"^DEEPINFER_HF_MODEL_DIR: '/nowhere'"):
        model_folder(None, {"DEEPINFER_HF_MODEL_DIR": "/nowhere"})


def test_a_missing_checkpoint_is_one_line() -> None:
    check_checkpoint(SHIPPED["tandem-mini"])
    with pytest.raises(StartupError, match=r"has no checkpoint: model\.safetensors\.index\.json"):
        check_checkpoint(SHIPPED["tandem-tiny"])
