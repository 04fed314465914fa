"""Which model a name means: a folder, one that ships with Tandem, or one in Hugging Face's cache.

Nothing is ever downloaded: a name without a folder is an error that says where to put one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from cluster.errors import StartupError

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = {
    name: ROOT / "deploy" / "models" / name.removeprefix("tandem-")
    for name in ("tandem-mini", "tandem-tiny")
}
DEFAULT = "tandem-mini"
FOLDER_VARIABLE = "DEEPINFER_HF_MODEL_DIR"
INDEX = "model.safetensors.index.json"


def model_folder(name: str | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of `name`, which has a config.json.

    Without a name: the folder that DEEPINFER_HF_MODEL_DIR names, else tandem-mini. A name that is
    given is never overruled. StartupError says what there is instead.
    """
    environ = os.environ if environ is None else environ
    said = "the model"
    if name is None:
        name, said = environ.get(FOLDER_VARIABLE) or DEFAULT, FOLDER_VARIABLE
    for folder in (SHIPPED.get(name), Path(name), _cached(name, environ)):
        if folder is not None and (folder / "config.json").is_file():
            return folder
    raise StartupError(f"{said}: {name!r} {_why_not(name)}")


def has_checkpoint(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def check_checkpoint(folder: Path) -> None:
    """StartupError where there are no weights to load."""
    if not has_checkpoint(folder):
        raise StartupError(
            f"{folder} has no checkpoint: {INDEX} is missing; put the weights there, or ask for "
            'random ones with load_format="dummy"'
        )


def _why_not(name: str) -> str:
    if Path(name).is_dir():
        return "is a folder without config.json"
    near = get_close_matches(name, SHIPPED, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if _repository(name):
        hint = f" nor in Hugging Face's cache; download it there, or set {FOLDER_VARIABLE} to it"
    return f"is no folder, none of {', '.join(SHIPPED)}{hint}"


def _repository(name: str) -> bool:
    owner, slash, model = name.partition("/")
    return bool(owner and slash and model) and "/" not in model and not owner.startswith(".")


def _cached(name: str, environ: Mapping[str, str]) -> Path | None:
    """The snapshot that a download of `owner/model` has left, the newest of several."""
    if not _repository(name):
        return None
    home = environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    snapshots = (hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*")
    return max(snapshots, key=lambda folder: folder.stat().st_mtime, default=None)
