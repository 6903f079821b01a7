"""Position encodings: every way the literature tells attention where a token is, as tested functions of positions.

``ENCODINGS`` is the list of them: which socket each fills, where it is, its source, and who uses it. Importing this
package imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple


class Encoding(NamedTuple):
    """``home`` is ``file.name`` in this package; ``socket`` is added, rotated, biased, convolved, or none."""

    home: str
    socket: str
    source: str
    used_by: str = ""


ENCODINGS: dict[str, Encoding] = {
    # added: (grid or positions) -> [n, dim], summed into tokens or into queries and keys
    "sine 1-D, interleaved": Encoding("sine.sine_vaswani", "added", "Vaswani et al. 2017, 3.5", "Transformer"),
    "sine 1-D, concatenated": Encoding(
        "sine.sine_tensor2tensor", "added", "tensor2tensor, common_attention", "fairseq, M2M-100, Whisper"
    ),
    "sine 1-D, concatenated, plain steps": Encoding(
        "sine.sine_marian", "added", "Marian; RoFormer, absolute", "Marian"
    ),
    "sine 2-D, DETR": Encoding(
        "sine.sine_detr", "added", "Carion et al. 2020, A.4", "DETR, Mask2Former, SAM 2, RF-DETR"
    ),
    "sine 2-D, Deformable": Encoding("sine.sine_deformable", "added", "Zhu et al. 2021", "Deformable DETR"),
    "sine 2-D, MAE": Encoding("sine.sine_mae", "added", "He et al. 2022", "MAE"),
    "sine 2-D, MoCo": Encoding("sine.sine_moco", "added", "Chen et al. 2021; big_vision", "MoCo v3, big_vision ViT"),
    "sine 2-D, timm": Encoding("sine.sine_timm", "added", "timm, build_sincos2d_pos_embed", "timm"),
    "sine 2-D, LoFTR": Encoding("sine.sine_loftr", "added", "Sun et al. 2021, 3.2", "LoFTR"),
    "sine 2-D, LoFTR as released": Encoding("sine.sine_loftr_legacy", "added", "LoFTR's first code", "LoFTR outdoor"),
    "sine 3-D, video": Encoding("sine.sine_mask2former_video", "added", "Cheng et al. 2021", "Mask2Former video"),
    "table with grid": Encoding(
        "learned.GridTable", "added", "Dosovitskiy et al. 2021, 3.1", "ViT, DeiT, DINOv2, RF-DETR"
    ),
    "table, windowed": Encoding("learned.WindowedTable", "added", "Ravi et al. 2024 (Hiera)", "SAM 2"),
    "row + column table": Encoding("learned.RowColumnTable", "added", "Carion et al. 2020", "DETR, learned"),
    "NaViT, absolute": Encoding("learned.NaViTAbsolute", "added", "Dehghani et al. 2023, 2.1", "NaViT"),
    "NaViT, fractional": Encoding("learned.NaViTFractional", "added", "Dehghani et al. 2023, 2.1", "NaViT"),
    "factorised table": Encoding("learned.FactorisedTable", "added", "timm NaFlex", "NaFlex ViT"),
    "object queries": Encoding("learned.ObjectQueries", "added", "Carion et al. 2020, 3.2", "DETR"),
    "content queries": Encoding("learned.ContentQueries", "added", "Cheng et al. 2022", "Mask2Former, Deformable DETR"),
    "level embedding": Encoding("learned.LevelEmbedding", "added", "Zhu et al. 2021", "Deformable DETR, Mask2Former"),
    "random Fourier": Encoding(
        "fourier.RandomFourier", "added", "Tancik et al. 2020; Kirillov et al. 2023", "SAM, SAM 2"
    ),
    "prompts": Encoding("fourier.PromptEncoding", "added", "Kirillov et al. 2023, A", "SAM, SAM 2"),
    "memory frames": Encoding("temporal.MemoryFrames", "added", "Ravi et al. 2024", "SAM 2"),
    "object pointers": Encoding("temporal.sine_object_pointers", "added", "Ravi et al. 2024", "SAM 2.1"),
    # rotated: positions -> angles, applied to queries and keys
    "rotary 1-D": Encoding("rotary.phases", "rotated", "Su et al. 2021, 3.2.2", "RoFormer, Llama"),
    "rotary, learned basis": Encoding("rotary.LearnedBasis", "rotated", "Lindenberger et al. 2023, 3.1", "LightGlue"),
    "rotary, M-RoPE": Encoding("rotary.mrope_chunked", "rotated", "Wang et al. 2024", "Qwen2-VL"),
    "rotary, interleaved M-RoPE": Encoding("rotary.mrope_interleaved", "rotated", "Qwen3-VL", "Qwen3-VL"),
    "rotary 2-D axial": Encoding("axial.axial_ropevit", "rotated", "Heo et al. 2024", "RoPE-ViT"),
    "rotary 2-D, EVA": Encoding("axial.axial_timm", "rotated", "Fang et al. 2023", "EVA-02, timm"),
    "rotary 2-D, Perception Encoder": Encoding("axial.axial_pe", "rotated", "Bolya et al. 2025", "PE"),
    "rotary 2-D, SAM 2": Encoding("axial.axial_sam2", "rotated", "Ravi et al. 2024", "SAM 2 memory attention"),
    "rotary 2-D, EfficientLoFTR": Encoding(
        "axial.axial_efficient_loftr", "rotated", "Wang et al. 2024, 3.2", "EfficientLoFTR"
    ),
    "rotary 2-D, DINOv3": Encoding("axial.axial_dinov3", "rotated", "Simeoni et al. 2025", "DINOv3"),
    "rotary 2-D mixed": Encoding("axial.MixedAxial", "rotated", "Heo et al. 2024", "RoPE-ViT"),
    "rotary linear attention": Encoding("linear.rotary_linear_attention", "rotated", "Su et al. 2021, 3.3", "RoFormer"),
    "rotary Performer": Encoding("linear.performer_rotary_attention", "rotated", "performer-pytorch", "Performer"),
    # rotated, further than trained: frequencies -> frequencies
    "PI": Encoding("scaling.interpolate", "rotated", "Chen et al. 2023", "LongChat; EVA-02's reference grid"),
    "NTK-aware": Encoding("scaling.ntk", "rotated", "Peng et al. 2023, 3.1"),
    "dynamic NTK": Encoding("scaling.dynamic_ntk", "rotated", "Peng et al. 2023, 3.3"),
    "YaRN": Encoding("scaling.yarn", "rotated", "Peng et al. 2023, 3.2 and 3.4", "DeepSeek, gpt-oss"),
    "LongRoPE": Encoding("scaling.longrope", "rotated", "Ding et al. 2024", "Phi-3"),
    # biased: [heads, n, m] added to the score
    "ALiBi, causal": Encoding("alibi.alibi_causal", "biased", "Press et al. 2022", "MPT, BLOOM"),
    "ALiBi, symmetric": Encoding("alibi.alibi_symmetric", "biased", "Press et al. 2022"),
    "ALiBi, 2-D": Encoding("alibi.alibi_2d", "biased", "Press et al. 2022, on a grid", "CROMA"),
    "T5 buckets": Encoding("bias.T5Bias", "biased", "Raffel et al. 2020, 2.1", "T5 encoder"),
    "T5 buckets, causal": Encoding("bias.CausalT5Bias", "biased", "Raffel et al. 2020, 2.1", "T5 decoder"),
    "Shaw": Encoding("bias.ShawBias", "biased", "Shaw et al. 2018", "Music Transformer, wav2vec2-bert"),
    "Swin table": Encoding("bias.SwinBias", "biased", "Liu et al. 2021, 3.2", "Swin"),
    "Swin V2, continuous": Encoding("bias.SwinV2Bias", "biased", "Liu et al. 2022, 3.3", "Swin V2"),
    "decomposed": Encoding("bias.DecomposedBias", "biased", "Li et al. 2022 (MViTv2)", "ViTDet, SAM"),
    # convolved: inside the block
    "Mix-FFN": Encoding("conv.MixFFN", "convolved", "Xie et al. 2021, 3.1", "SegFormer"),
    "PEG": Encoding("conv.PEG", "convolved", "Chu et al. 2021, 3.2", "CPVT, Twins"),
    # none: named, so that an ablation can ask for it
    "none": Encoding("none.no_addition", "none", "Haviv et al. 2022; Kazemnejad et al. 2023"),
}
