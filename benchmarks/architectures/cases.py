"""Small models with random weights, by name, of architectures that nobody prepared, with the shapes of their inputs.

A size of a shape is a number, or the name of one that stays free and takes the `SIZES` of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

Shape = tuple[int | str, ...]
Case = tuple[Callable[[], Any], Mapping[str, Shape]]  # what makes the model, and the shapes of its inputs by name

SIZES = {  # those of the export first
    "batch": (2, 1, 3), "sequence": (7, 16, 33), "target": (5, 1, 9), "height": (64, 128, 96), "width": (96, 64, 128),
    "samples": (400, 1000, 640),
}  # fmt: skip
VOCABULARY = 99


def transformer(config: str, model: str, **arguments: Any) -> Any:
    """A model of `transformers` by the classes of its configuration and of itself."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**arguments))


def encoder(config: str, model: str, **arguments: Any) -> Any:
    """The encoder of such a model."""
    return transformer(config, model, **arguments).get_encoder()


def image_model(name: str, **arguments: Any) -> Any:
    """A model of `timm` by its name."""
    from ..zoo.timm_alone import import_timm

    return import_timm().create_model(name, **arguments)


def diffusion(name: str, **arguments: Any) -> Any:
    """A model of `diffusers` by its class."""
    import diffusers

    return getattr(diffusers, name)(**arguments)


def inputs_of(shapes: Mapping[str, Shape], n: int, seed: int) -> dict[str, np.ndarray]:
    """Arrays of the n-th sizes: identifiers, masks that hide the ends of rows, and floats, as the names of the inputs say."""
    rng, arrays = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, shape in shapes.items():
        sizes = tuple(d if isinstance(d, int) else SIZES[d][n] for d in shape)
        if name.endswith("ids"):
            arrays[name] = rng.integers(3, VOCABULARY, sizes)
        elif name == "timestep":
            arrays[name] = rng.integers(0, 1000, sizes)
        elif name.endswith("mask"):
            lengths = rng.integers(1, sizes[-1] + 1, (*sizes[:-1], 1))
            arrays[name] = (np.arange(sizes[-1]) < np.maximum(lengths, sizes[-1] // 2)).astype(np.int64)
        else:
            arrays[name] = rng.standard_normal(sizes).astype(np.float32)
    return arrays


IDS: dict[str, Shape] = {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}
PAIR: dict[str, Shape] = IDS | {"decoder_input_ids": ("batch", "target")}
IMAGES: dict[str, Shape] = {"pixel_values": ("batch", 3, "height", "width")}
ONE_SIZE: dict[str, Shape] = {"pixel_values": ("batch", 3, 32, 32)}  # of models whose positions are learned for one size of images
SIDE_64: dict[str, Shape] = {"pixel_values": ("batch", 3, 64, 64)}
SOUND: dict[str, Shape] = {"input_values": ("batch", "samples")}
MEL: dict[str, Shape] = {"input_features": ("batch", 16, 80)}
PICTURES: dict[str, Shape] = {"x": ("batch", 3, "height", "width")}

WIDE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT: dict[str, Any] = WIDE | {"vocab_size": VOCABULARY}
LLAMA: dict[str, Any] = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0}
IMAGE: dict[str, Any] = WIDE | {"image_size": 32, "patch_size": 8}
HEADS_8: dict[str, Any] = LLAMA | {"head_dim": 8}
PYRAMID: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
TWO_SIDES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": VOCABULARY, "use_cache": False, "max_position_embeddings": 64,
}  # fmt: skip
T5: dict[str, Any] = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_kv": 8, "vocab_size": VOCABULARY, "use_cache": False}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "use_cache": False}
CONVOLVED: dict[str, Any] = TEXT | {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}  # fmt: skip
WHISPER: dict[str, Any] = TWO_SIDES | {"num_mel_bins": 16, "max_source_positions": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
BATCHED = {"experts_implementation": "batched_mm"}  # PyTorch writes no ONNX model with the other ways to compute experts
EXPERTS: dict[str, Any] = BATCHED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
STATE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": VOCABULARY, "use_cache": False}
SWIN: dict[str, Any] = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
BACKBONE: dict[str, Any] = {"use_timm_backbone": False, "use_pretrained_backbone": False}

CASES: dict[str, Case] = {
    "albert": (partial(transformer, "AlbertConfig", "AlbertModel", **TEXT, embedding_size=16), IDS),
    "bert": (partial(transformer, "BertConfig", "BertModel", **TEXT), IDS),
    "big_bird": (partial(transformer, "BigBirdConfig", "BigBirdModel", **TEXT, attention_type="original_full"), IDS),
    "convbert": (partial(transformer, "ConvBertConfig", "ConvBertModel", **TEXT, embedding_size=32), IDS),
    "deberta": (partial(transformer, "DebertaConfig", "DebertaModel", **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]), IDS),
    "deberta_v2": (partial(transformer, "DebertaV2Config", "DebertaV2Model", **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]), IDS),
    "distilbert": (partial(transformer, "DistilBertConfig", "DistilBertModel", dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=99), IDS),
    "electra": (partial(transformer, "ElectraConfig", "ElectraModel", **TEXT, embedding_size=16), IDS),
    "fnet": (partial(transformer, "FNetConfig", "FNetModel", **TEXT), {"input_ids": IDS["input_ids"]}),
    "funnel": (partial(transformer, "FunnelConfig", "FunnelModel", block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=64, vocab_size=99), IDS),
    "layoutlm": (partial(transformer, "LayoutLMConfig", "LayoutLMModel", **TEXT), IDS),
    "mobilebert": (partial(transformer, "MobileBertConfig", "MobileBertModel", **TEXT, embedding_size=16, intra_bottleneck_size=16), IDS),
    "modernbert": (partial(transformer, "ModernBertConfig", "ModernBertModel", **TEXT, pad_token_id=0, local_attention=8), IDS),
    "mpnet": (partial(transformer, "MPNetConfig", "MPNetModel", **TEXT), IDS),
    "nystromformer": (partial(transformer, "NystromformerConfig", "NystromformerModel", **TEXT, num_landmarks=64, segment_means_seq_len=64), IDS),
    "roberta": (partial(transformer, "RobertaConfig", "RobertaModel", **TEXT, max_position_embeddings=64), IDS),
    "roformer": (partial(transformer, "RoFormerConfig", "RoFormerModel", **TEXT, embedding_size=32), IDS),
    "squeezebert": (partial(transformer, "SqueezeBertConfig", "SqueezeBertModel", **TEXT, embedding_size=32), IDS),
    "xlnet": (partial(transformer, "XLNetConfig", "XLNetModel", d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=99), IDS),
    "bloom": (partial(transformer, "BloomConfig", "BloomForCausalLM", hidden_size=32, n_layer=2, n_head=4, vocab_size=99, use_cache=False), IDS),
    "codegen": (partial(transformer, "CodeGenConfig", "CodeGenForCausalLM", **GPT2, rotary_dim=4), IDS),
    "cohere": (partial(transformer, "CohereConfig", "CohereForCausalLM", **LLAMA), IDS),
    "deepseek_v3": (partial(transformer, "DeepseekV3Config", "DeepseekV3ForCausalLM", **BATCHED, **LLAMA, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8), IDS),
    "falcon": (partial(transformer, "FalconConfig", "FalconForCausalLM", **TEXT, use_cache=False), IDS),
    "gemma": (partial(transformer, "GemmaConfig", "GemmaForCausalLM", **HEADS_8), IDS),
    "gemma2": (partial(transformer, "Gemma2Config", "Gemma2ForCausalLM", **HEADS_8, sliding_window=8), IDS),
    "gpt2": (partial(transformer, "GPT2Config", "GPT2LMHeadModel", **GPT2), IDS),
    "gpt_bigcode": (partial(transformer, "GPTBigCodeConfig", "GPTBigCodeForCausalLM", **GPT2), IDS),
    "gpt_neox": (partial(transformer, "GPTNeoXConfig", "GPTNeoXForCausalLM", **TEXT, use_cache=False), IDS),
    "gpt_oss": (partial(transformer, "GptOssConfig", "GptOssForCausalLM", **BATCHED, **HEADS_8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8), IDS),
    "gptj": (partial(transformer, "GPTJConfig", "GPTJForCausalLM", **GPT2, rotary_dim=4), IDS),
    "granite": (partial(transformer, "GraniteConfig", "GraniteForCausalLM", **LLAMA), IDS),
    "jamba": (partial(transformer, "JambaConfig", "JambaForCausalLM", **BATCHED, **LLAMA, num_experts=2, use_mamba_kernels=False, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1), IDS),
    "lfm2": (partial(transformer, "Lfm2Config", "Lfm2ForCausalLM", **LLAMA, layer_types=["conv", "full_attention"]), IDS),
    "llama": (partial(transformer, "LlamaConfig", "LlamaForCausalLM", **LLAMA), IDS),
    "mamba": (partial(transformer, "MambaConfig", "MambaForCausalLM", **STATE), IDS),
    "mamba2": (partial(transformer, "Mamba2Config", "Mamba2ForCausalLM", **STATE, num_heads=8, head_dim=8, n_groups=2, chunk_size=8), IDS),
    "mistral": (partial(transformer, "MistralConfig", "MistralForCausalLM", **LLAMA, sliding_window=8), IDS),
    "mixtral": (partial(transformer, "MixtralConfig", "MixtralForCausalLM", **BATCHED, **LLAMA, num_local_experts=4, num_experts_per_tok=2), IDS),
    "mpt": (partial(transformer, "MptConfig", "MptForCausalLM", d_model=32, n_layers=2, n_heads=4, vocab_size=99, max_seq_len=64, use_cache=False), IDS),
    "olmo2": (partial(transformer, "Olmo2Config", "Olmo2ForCausalLM", **LLAMA), IDS),
    "opt": (partial(transformer, "OPTConfig", "OPTForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, vocab_size=99, word_embed_proj_dim=32, use_cache=False), IDS),
    "phi": (partial(transformer, "PhiConfig", "PhiForCausalLM", **LLAMA), IDS),
    "phi3": (partial(transformer, "Phi3Config", "Phi3ForCausalLM", **LLAMA), IDS),
    "qwen2": (partial(transformer, "Qwen2Config", "Qwen2ForCausalLM", **LLAMA), IDS),
    "qwen2_moe": (partial(transformer, "Qwen2MoeConfig", "Qwen2MoeForCausalLM", **LLAMA, **EXPERTS, shared_expert_intermediate_size=16), IDS),
    "qwen3": (partial(transformer, "Qwen3Config", "Qwen3ForCausalLM", **HEADS_8), IDS),
    "qwen3_moe": (partial(transformer, "Qwen3MoeConfig", "Qwen3MoeForCausalLM", **HEADS_8, **EXPERTS), IDS),
    "rwkv": (partial(transformer, "RwkvConfig", "RwkvForCausalLM", hidden_size=32, num_hidden_layers=2, vocab_size=99, use_cache=False), IDS),
    "stablelm": (partial(transformer, "StableLmConfig", "StableLmForCausalLM", **LLAMA), IDS),
    "starcoder2": (partial(transformer, "Starcoder2Config", "Starcoder2ForCausalLM", **LLAMA), IDS),
    "bart": (partial(transformer, "BartConfig", "BartModel", **TWO_SIDES), PAIR),
    "blenderbot": (partial(transformer, "BlenderbotConfig", "BlenderbotModel", **TWO_SIDES), PAIR),
    "marian": (partial(transformer, "MarianConfig", "MarianModel", **TWO_SIDES, pad_token_id=0), PAIR),
    "pegasus": (partial(transformer, "PegasusConfig", "PegasusModel", **TWO_SIDES), PAIR),
    "t5": (partial(transformer, "T5Config", "T5Model", **T5), PAIR),
    "t5_encoder": (partial(transformer, "T5Config", "T5EncoderModel", **T5), IDS),
    "beit": (partial(transformer, "BeitConfig", "BeitModel", **IMAGE), ONE_SIZE),
    "clip": (partial(transformer, "CLIPConfig", "CLIPModel", text_config=TEXT | {"max_position_embeddings": 64, "eos_token_id": 2}, vision_config=IMAGE, projection_dim=16), IDS | ONE_SIZE),
    "convnext": (partial(transformer, "ConvNextConfig", "ConvNextModel", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]), IMAGES),
    "cvt": (partial(transformer, "CvtConfig", "CvtModel", embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 1, 1]), IMAGES),
    "deit": (partial(transformer, "DeiTConfig", "DeiTModel", **IMAGE), ONE_SIZE),
    "dinov2": (partial(transformer, "Dinov2Config", "Dinov2Model", **IMAGE), IMAGES),
    "depth_anything": (partial(transformer, "DepthAnythingConfig", "DepthAnythingForDepthEstimation", backbone_config={"model_type": "dinov2", **IMAGE, "out_features": ["stage1", "stage2"], "reshape_hidden_states": False}, reassemble_hidden_size=32, patch_size=8, reassemble_factors=[1, 0.5], neck_hidden_sizes=[8, 16], fusion_hidden_size=16, head_hidden_size=8), ONE_SIZE),
    "dpt": (partial(transformer, "DPTConfig", "DPTForDepthEstimation", **IMAGE | {"num_hidden_layers": 4, "patch_size": 16, "image_size": 64}, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 16, 24, 32], fusion_hidden_size=16), SIDE_64),
    "efficientnet": (partial(transformer, "EfficientNetConfig", "EfficientNetModel", width_coefficient=0.25, depth_coefficient=0.25), IMAGES),
    "focalnet": (partial(transformer, "FocalNetConfig", "FocalNetModel", image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3]), ONE_SIZE),
    "glpn": (partial(transformer, "GLPNConfig", "GLPNForDepthEstimation", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16), IMAGES),
    "hiera": (partial(transformer, "HieraConfig", "HieraModel", embed_dim=16, image_size=[64, 64], depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 8]), SIDE_64),
    "levit": (partial(transformer, "LevitConfig", "LevitModel", image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 2], key_dim=[8, 8, 8], depths=[1, 1, 1]), SIDE_64),
    "mobilenet_v2": (partial(transformer, "MobileNetV2Config", "MobileNetV2Model", depth_multiplier=0.25), IMAGES),
    "mobilevit": (partial(transformer, "MobileViTConfig", "MobileViTModel", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], num_attention_heads=4), IMAGES),
    "mobilevit_v2": (partial(transformer, "MobileViTV2Config", "MobileViTV2Model", width_multiplier=0.25), IMAGES),
    "poolformer": (partial(transformer, "PoolFormerConfig", "PoolFormerModel", **PYRAMID), IMAGES),
    "pvt": (partial(transformer, "PvtConfig", "PvtModel", image_size=64, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4]), SIDE_64),
    "pvt_v2": (partial(transformer, "PvtV2Config", "PvtV2Model", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4]), IMAGES),
    "regnet": (partial(transformer, "RegNetConfig", "RegNetModel", embedding_size=8, **PYRAMID, groups_width=8), IMAGES),
    "resnet": (partial(transformer, "ResNetConfig", "ResNetModel", embedding_size=8, **PYRAMID), IMAGES),
    "segformer": (partial(transformer, "SegformerConfig", "SegformerForSemanticSegmentation", **PYRAMID, num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16), IMAGES),
    "siglip": (partial(transformer, "SiglipVisionConfig", "SiglipVisionModel", **IMAGE), ONE_SIZE),
    "swin": (partial(transformer, "SwinConfig", "SwinModel", **SWIN), IMAGES),
    "swinv2": (partial(transformer, "Swinv2Config", "Swinv2Model", **SWIN), ONE_SIZE),
    "upernet": (partial(transformer, "UperNetConfig", "UperNetForSemanticSegmentation", backbone_config={"model_type": "convnext", **PYRAMID, "out_features": ["stage1", "stage2", "stage3", "stage4"]}, hidden_size=16, use_auxiliary_head=False), IMAGES),
    "vilt": (partial(transformer, "ViltConfig", "ViltModel", **TEXT, image_size=32, patch_size=8), IDS | ONE_SIZE),
    "vit": (partial(transformer, "ViTConfig", "ViTModel", **IMAGE), ONE_SIZE),
    "yolos": (partial(transformer, "YolosConfig", "YolosForObjectDetection", **IMAGE | {"image_size": [64, 64]}, num_detection_tokens=5), SIDE_64),
    "detr": (partial(transformer, "DetrConfig", "DetrForObjectDetection", **TWO_SIDES | {"max_position_embeddings": 1024}, num_queries=6, **BACKBONE, backbone_config={"model_type": "resnet", "embedding_size": 8, **PYRAMID, "out_features": ["stage4"]}), IMAGES),
    "rt_detr": (partial(transformer, "RTDetrConfig", "RTDetrForObjectDetection", d_model=32, encoder_hidden_dim=32, encoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4, decoder_ffn_dim=64, decoder_layers=2, num_queries=10, encoder_in_channels=[16, 24, 32], decoder_in_channels=[32, 32, 32], num_denoising=0, anchor_image_size=None, backbone_config={"model_type": "rt_detr_resnet", "embedding_size": 8, **PYRAMID, "out_features": ["stage2", "stage3", "stage4"]}), IMAGES),
    "superpoint": (partial(transformer, "SuperPointConfig", "SuperPointForKeypointDetection", encoder_hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, keypoint_decoder_dim=65, descriptor_decoder_dim=16), IMAGES),
    "ast": (partial(transformer, "ASTConfig", "ASTModel", **WIDE, patch_size=4, num_mel_bins=16, max_length=32), {"input_values": ("batch", 32, 16)}),
    "encodec": (partial(transformer, "EncodecConfig", "EncodecModel", num_filters=4, hidden_size=16, codebook_size=32, codebook_dim=16, upsampling_ratios=[4, 2], normalize=False), {"input_values": ("batch", 1, "samples")}),
    "hubert": (partial(transformer, "HubertConfig", "HubertModel", **CONVOLVED), SOUND),
    "moonshine": (partial(transformer, "MoonshineConfig", "MoonshineModel", vocab_size=99, hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1, encoder_num_attention_heads=4, decoder_num_attention_heads=4, use_cache=False), {"input_values": ("batch", "samples"), "decoder_input_ids": ("batch", "target")}),
    "sew": (partial(transformer, "SEWConfig", "SEWModel", **CONVOLVED, squeeze_factor=2), SOUND),
    "wav2vec2": (partial(transformer, "Wav2Vec2Config", "Wav2Vec2Model", **CONVOLVED), SOUND),
    "wavlm": (partial(transformer, "WavLMConfig", "WavLMModel", **CONVOLVED), SOUND),
    "whisper": (partial(transformer, "WhisperConfig", "WhisperModel", **WHISPER), MEL | {"decoder_input_ids": ("batch", "target")}),
    "whisper_encoder": (partial(encoder, "WhisperConfig", "WhisperModel", **WHISPER), MEL),
    "patchtsmixer": (partial(transformer, "PatchTSMixerConfig", "PatchTSMixerModel", context_length=32, num_input_channels=3, d_model=8, num_layers=2), {"past_values": ("batch", 32, 3)}),
    "patchtst": (partial(transformer, "PatchTSTConfig", "PatchTSTModel", context_length=32, num_input_channels=3, d_model=16, num_hidden_layers=2), {"past_values": ("batch", 32, 3)}),
    "unet_text": (partial(diffusion, "UNet2DConditionModel", block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=16, attention_head_dim=4), {"sample": ("batch", 4, "height", "width"), "timestep": ("batch",), "encoder_hidden_states": ("batch", "sequence", 16)}),
    "vae": (partial(diffusion, "AutoencoderKL", block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2), {"sample": ("batch", 3, "height", "width")}),
    "timm_coatnet": (partial(image_model, "coatnet_pico_rw_224", img_size=64), {"x": ("batch", 3, 64, 64)}),
    "timm_cspnet": (partial(image_model, "cspresnet50"), PICTURES),
    "timm_densenet": (partial(image_model, "densenet121"), PICTURES),
    "timm_dpn": (partial(image_model, "dpn48b"), PICTURES),
    "timm_edgenext": (partial(image_model, "edgenext_xx_small"), PICTURES),
    "timm_efficientformer": (partial(image_model, "efficientformerv2_s0"), {"x": ("batch", 3, 224, 224)}),
    "timm_fastvit": (partial(image_model, "fastvit_t8"), PICTURES),
    "timm_ghostnet": (partial(image_model, "ghostnet_050"), PICTURES),
    "timm_hardcorenas": (partial(image_model, "hardcorenas_a"), PICTURES),
    "timm_hgnet": (partial(image_model, "hgnetv2_b0"), PICTURES),
    "timm_hrnet": (partial(image_model, "hrnet_w18_small"), PICTURES),
    "timm_lcnet": (partial(image_model, "lcnet_050"), PICTURES),
    "timm_mixer": (partial(image_model, "mixer_s32_224", img_size=64), {"x": ("batch", 3, 64, 64)}),
    "timm_mobilenetv3": (partial(image_model, "mobilenetv3_small_050"), PICTURES),
    "timm_nfnet": (partial(image_model, "nfnet_l0"), PICTURES),
    "timm_repvgg": (partial(image_model, "repvgg_a0"), PICTURES),
    "timm_res2net": (partial(image_model, "res2net50_14w_8s"), PICTURES),
    "timm_resnest": (partial(image_model, "resnest14d"), PICTURES),
    "timm_sknet": (partial(image_model, "skresnet18"), PICTURES),
    "timm_starnet": (partial(image_model, "starnet_s1"), PICTURES),
    "timm_tinyvit": (partial(image_model, "tiny_vit_5m_224"), {"x": ("batch", 3, 64, 64)}),
    "timm_vovnet": (partial(image_model, "ese_vovnet19b_dw"), PICTURES),
    "timm_xcit": (partial(image_model, "xcit_nano_12_p16_224"), PICTURES),
}  # fmt: skip
