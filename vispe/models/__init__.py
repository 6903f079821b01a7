"""The zoo's whole registry: a model's name and the file it lives in.

Each file has ``MODEL`` (its class), a Spec above it and ``VARIANTS`` (name -> spec); the facts about its weights are in
``models/<file>.toml``. Listing names imports no torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType

MODELS: dict[str, str] = {
    "aliked_t16": "aliked",
    "aliked_n16": "aliked",
    "aliked_n16rot": "aliked",
    "aliked_n32": "aliked",
    "disk": "disk",
    "superpoint": "superpoint",
    "lightglue_aliked": "lightglue",
    "lightglue_disk": "lightglue",
    "lightglue_superpoint": "lightglue",
    "lightglue_sift": "lightglue",
    "lightglue_doghardnet": "lightglue",
    "lightglue_sift_small": "lightglue",
    "lightglue_aliked_t16_small": "lightglue",
    "lightglue": "lightglue",  # for features of any kind, to be trained
    "loftr_outdoor": "loftr",
    "loftr_indoor": "loftr",
    "loftr_indoor_new": "loftr",
    "loftr_coarse_bmvs": "loftr",
    "efficient_loftr": "efficient_loftr",
    "vit_tiny_patch16_224": "vit",
    "vit_tiny_patch16_384": "vit",
    "vit_small_patch16_224": "vit",
    "vit_small_patch16_384": "vit",
    "vit_base_patch16_224": "vit",
    "vit_base_patch16_384": "vit",
    "vit_large_patch16_224": "vit",
    "vit_large_patch16_384": "vit",
    "vit_small_patch32_224": "vit",
    "vit_small_patch32_384": "vit",
    "vit_base_patch32_224": "vit",
    "vit_base_patch32_384": "vit",
    "vit_large_patch32_224": "vit",
    "vit_large_patch32_384": "vit",
    "vit_base_patch8_224": "vit",
    "vit_huge_patch14_224": "vit",
    "vit_small_patch8_224": "vit",
    "deit_tiny_patch16_224": "vit",
    "deit_tiny_distilled_patch16_224": "vit",
    "deit_small_patch16_224": "vit",
    "deit_small_distilled_patch16_224": "vit",
    "deit_base_patch16_224": "vit",
    "deit_base_distilled_patch16_224": "vit",
    "deit_base_patch16_384": "vit",
    "deit_base_distilled_patch16_384": "vit",
    "deit3_small_patch16_224": "vit",
    "deit3_small_patch16_384": "vit",
    "deit3_base_patch16_224": "vit",
    "deit3_base_patch16_384": "vit",
    "deit3_large_patch16_224": "vit",
    "deit3_large_patch16_384": "vit",
    "deit3_medium_patch16_224": "vit",
    "deit3_huge_patch14_224": "vit",
    "vit_small_patch16_rope_224": "vit",
    "vit_small_patch16_rope_mixed_224": "vit",
    "vit_small_patch16_rope_ape_224": "vit",
    "vit_small_patch16_rope_mixed_ape_224": "vit",
    "vit_base_patch16_rope_224": "vit",
    "vit_base_patch16_rope_mixed_224": "vit",
    "vit_base_patch16_rope_ape_224": "vit",
    "vit_base_patch16_rope_mixed_ape_224": "vit",
    "vit_large_patch16_rope_224": "vit",
    "vit_large_patch16_rope_mixed_224": "vit",
    "vit_large_patch16_rope_ape_224": "vit",
    "vit_large_patch16_rope_mixed_ape_224": "vit",
    "vit_small_patch14_dinov2": "vit",
    "vit_small_patch14_reg4_dinov2": "vit",
    "vit_base_patch14_dinov2": "vit",
    "vit_base_patch14_reg4_dinov2": "vit",
    "vit_large_patch14_dinov2": "vit",
    "vit_large_patch14_reg4_dinov2": "vit",
    "vit_giant_patch14_dinov2": "vit",
    "vit_giant_patch14_reg4_dinov2": "vit",
    "vit_small_patch16_dinov3": "vit",
    "vit_small_patch16_dinov3_qkvb": "vit",
    "vit_small_plus_patch16_dinov3": "vit",
    "vit_small_plus_patch16_dinov3_qkvb": "vit",
    "vit_base_patch16_dinov3": "vit",
    "vit_base_patch16_dinov3_qkvb": "vit",
    "vit_large_patch16_dinov3": "vit",
    "vit_large_patch16_dinov3_qkvb": "vit",
    "vit_huge_plus_patch16_dinov3": "vit",
    "vit_huge_plus_patch16_dinov3_qkvb": "vit",
    "mae_vit_base_patch16": "mae",
    "mae_vit_large_patch16": "mae",
    "mae_vit_huge_patch14": "mae",
    "detr_resnet50": "detr",
    "detr_resnet50_dc5": "detr",
    "detr_resnet101": "detr",
    "detr_resnet101_dc5": "detr",
    "mask2former_swin_tiny": "mask2former",
    "mask2former_resnet50": "mask2former",
    "segformer_b0": "segformer",
    "segformer_b1": "segformer",
    "segformer_b2": "segformer",
    "segformer_b3": "segformer",
    "segformer_b4": "segformer",
    "segformer_b5": "segformer",
    "segmenter_linear_tiny_patch16": "segmenter_linear",
    "segmenter_linear_small_patch16": "segmenter_linear",
    "segmenter_linear_base_patch16": "segmenter_linear",
    "segmenter_linear_large_patch16": "segmenter_linear",
}

EXTRACTORS = {
    # name -> the LightGlue weights trained for its descriptors
    "aliked_n16": "lightglue_aliked",
    "aliked_n16rot": "lightglue_aliked",
    "aliked_n32": "lightglue_aliked",
    "aliked_t16": "lightglue_aliked_t16_small",  # vispe's own: none was published
    "disk": "lightglue_disk",
    "sift": "lightglue_sift",
    "superpoint": "lightglue_superpoint",
}
SHIPPED = {"sift": "lightglue_sift_small"}  # taken where the published weights are not on this machine
DETECTOR_FREE = {  # name of the matcher -> the model that matches whole images, without keypoints
    "loftr": "loftr_outdoor",
    "loftr_indoor": "loftr_indoor_new",
    "loftr_coarse": "loftr_coarse_bmvs",
    "efficient_loftr": "efficient_loftr",
}
NEIGHBOURS = ("mutual_nn", "mutual_nn_ratio")  # mutual nearest neighbours of descriptors, and with Lowe's ratio test
RATIO = 0.8  # of the distances to the nearest and to the next: hloc's, and OpenCV's examples'
MATCHERS = ("lightglue", *NEIGHBOURS, *DETECTOR_FREE)


def list_models() -> list[str]:
    """The names that ``vispe.build`` and ``vispe.load`` take."""
    return list(MODELS)


def home(name: str) -> ModuleType:
    """The module of model ``name``, with or without a tag; ``ValueError`` lists the names there are."""
    variant = name.partition(".")[0]
    if variant not in MODELS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    return importlib.import_module(f"vispe.models.{MODELS[variant]}")
