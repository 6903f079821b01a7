"""timm, and the weights of its classifiers as the start of a backbone."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vispe.progress import quiet

CACHE = "TORCHINDUCTOR_CACHE_DIR"
CLASSIFIERS = ("fc.", "head.", "classifier.", "norm.")  # behind the last map of networks that come with one


def library() -> Any:
    """timm, imported when a backbone is built; ``ValueError`` says how to get it.

    It brings torch's compiler and sympy, which set an environment variable and a filter of warnings; the host is given
    neither (the compiler sets its variable again when it runs).
    """
    given = CACHE in os.environ
    try:
        with warnings.catch_warnings():
            import timm
    except ImportError as error:
        raise ValueError(f"backbones are timm's: pip install 'vispe[detect]' ({error})") from error
    if not given:
        os.environ.pop(CACHE, None)
    return timm


def take_weights(net: nn.Module, state: Mapping[str, Tensor], name: str) -> None:
    """Give a network of features the weights of a trained classifier ``name``, in timm's names (of ResNets also
    torchvision's), without what lies behind its last map.

    ``ValueError`` names what does not fit; then nothing has changed.
    """
    own = net.state_dict()
    given = {_flat(key, own): value for key, value in state.items() if not key.startswith(CLASSIFIERS)}
    given = {key: value for key, value in given.items() if key in own or not key.endswith("num_batches_tracked")}
    missing = [key for key in own if key not in given and not key.endswith("num_batches_tracked")]
    wrong = [key for key, value in given.items() if key not in own or own[key].shape != value.shape]
    if missing or wrong:
        raise ValueError(f"weights do not fit {name}: missing {missing[:3]}, unknown or misshapen {wrong[:3]}")
    net.load_state_dict({**own, **given})


def trained_classifier(name: str, knobs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights that timm publishes for ``name`` (of ImageNet), downloaded once; ``ValueError`` where that fails."""
    try:
        timm = library()  # imported first: then the hub's client has set its level
        with quiet("timm", "huggingface_hub", "httpx", "urllib3"):  # each retry is a line of theirs
            return timm.create_model(name, pretrained=True, **knobs).state_dict()
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"timm's weights of {name} cannot be had ({reason}); give a file of them instead") from error


def _flat(key: str, own: Mapping[str, Tensor]) -> str:
    """timm's name in a network of features: ``stages.0.`` has become ``stages_0.``"""
    return key if key in own else re.sub(r"^(\w+)\.(\d+)\.", r"\1_\2.", key)
