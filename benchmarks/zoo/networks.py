"""The networks of the zoo, by structure: those of timm by their names there, those of transformers by configuration, small enough for a
processor, and networks written in torch. All have random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TIMM = {
    "plain convolutions": (
        "vgg11", "resnet18", "resnet50", "resnet50d", "resnetv2_50", "wide_resnet50_2", "seresnet50", "ecaresnet26t", "res2net50_14w_8s",
        "resnest14d", "skresnet18", "densenet121", "dla34", "hrnet_w18_small", "inception_v3", "darknet53", "cspdarknet53", "cspresnet50",
        "selecsls42b", "repvgg_a0", "eca_nfnet_l0", "gernet_s", "vovnet39a", "hgnet_tiny", "rdnet_tiny", "ese_vovnet19b_dw",
    ),
    "grouped convolutions": (
        "resnext26ts", "resnext50_32x4d", "resnext101_32x4d", "seresnext26d_32x4d", "seresnext50_32x4d", "regnetx_002", "regnetx_008",
        "regnetx_016", "regnety_002", "regnety_008", "regnety_016", "regnetv_040", "regnetz_b16", "dpn48b", "dla46x_c", "gcresnext26ts",
        "cspresnext50",
    ),
    "depthwise convolutions": (
        "mobilenetv1_100", "mobilenetv2_100", "mobilenetv3_small_100", "mobilenetv3_large_100", "mobilenetv4_conv_small",
        "mobilenetv4_conv_medium", "mobilenetv4_hybrid_medium", "mnasnet_100", "fbnetc_100", "fbnetv3_b", "spnasnet_100", "lcnet_100",
        "tinynet_a", "ghostnet_100", "ghostnetv2_100", "efficientnet_b0", "efficientnet_lite0", "efficientnet_es", "tf_efficientnetv2_b0",
        "efficientnetv2_rw_t", "mixnet_s", "rexnet_100", "hardcorenas_a", "xception41", "legacy_xception", "starnet_s1", "repghostnet_050",
        "mobileone_s0", "hgnetv2_b0", "repvit_m0_9",
    ),
    "large windows": (
        "convnext_atto", "convnext_tiny", "convnextv2_atto", "convmixer_1024_20_ks9_p14", "inception_next_atto", "edgenext_xx_small",
        "fastvit_t8", "mambaout_femto", "focalnet_tiny_srf", "convformer_s18",
    ),
    "pooling as a mixer": ("poolformer_s12", "poolformerv2_s12"),
    "attention": (
        "vit_tiny_patch16_224", "vit_small_patch32_224", "vit_base_patch32_224", "deit_tiny_patch16_224", "deit3_small_patch16_224",
        "beit_base_patch16_224", "cait_xxs24_224", "xcit_nano_12_p16_224", "crossvit_tiny_240", "coat_lite_tiny", "convit_tiny",
        "visformer_tiny", "pit_ti_224", "pvt_v2_b0", "pvt_v2_b1", "volo_d1_224", "eva02_tiny_patch14_224", "flexivit_small",
        "vit_relpos_small_patch16_224", "mvitv2_tiny", "hiera_tiny_224", "twins_pcpvt_small", "caformer_s18", "davit_tiny", "gcvit_xxtiny",
    ),
    "windowed attention": (
        "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_224", "twins_svt_small", "nest_tiny", "maxvit_nano_rw_256", "coatnet_nano_rw_224",
    ),
    "attention and convolutions at few pixels": (
        "mobilevit_xxs", "mobilevit_s", "mobilevitv2_050", "efficientformer_l1", "efficientformerv2_s0", "efficientvit_b0", "efficientvit_m0",
        "tiny_vit_5m_224", "levit_128s", "levit_256", "shvit_s1", "botnet26t_256", "halonet26t", "lambda_resnet26t", "nextvit_small",
    ),
    "products without attention": ("mixer_s32_224", "mixer_b16_224", "gmlp_s16_224", "resmlp_12_224", "sequencer2d_s"),
}  # fmt: skip

TEXT = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 2000}
DECODER = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 256, "use_cache": False, "pad_token_id": 0}
GPT = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 2000, "use_cache": False}
IMAGE = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "image_size": 224,
    "patch_size": 16,
}
SERIES = {"context_length": 256, "patch_length": 16, "patch_stride": 16, "num_input_channels": 7, "prediction_length": 24}
SPEECH = {"d_model": 192, "encoder_layers": 4, "encoder_attention_heads": 3, "encoder_ffn_dim": 768, "decoder_layers": 1}

# By name: (structure, class of the configuration and of the model, arguments of the configuration, kind of the inputs).
TRANSFORMERS: Mapping[str, tuple[str, str, str, dict[str, Any], str]] = {
    "bert": ("text", "BertConfig", "BertModel", TEXT, "ids"),
    "roberta": ("text", "RobertaConfig", "RobertaModel", TEXT, "ids"),
    "distilbert": ("text", "DistilBertConfig", "DistilBertModel", {"dim": 256, "n_layers": 4, "n_heads": 4, "hidden_dim": 1024}, "ids"),
    "albert": ("text", "AlbertConfig", "AlbertModel", TEXT | {"embedding_size": 64}, "ids"),
    "electra": ("text", "ElectraConfig", "ElectraModel", TEXT | {"embedding_size": 64}, "ids"),
    "deberta_v2": ("text", "DebertaV2Config", "DebertaV2Model", TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "ids"),
    "mpnet": ("text", "MPNetConfig", "MPNetModel", TEXT, "ids"),
    "squeezebert": ("text", "SqueezeBertConfig", "SqueezeBertModel", TEXT | {"embedding_size": 256}, "ids"),
    "t5_encoder": ("text", "T5Config", "T5EncoderModel", {"d_model": 256, "num_layers": 4, "num_heads": 4, "d_ff": 1024, "vocab_size": 2000}, "ids"),
    "gpt2": ("text", "GPT2Config", "GPT2Model", GPT, "ids"),
    "opt": ("text", "OPTConfig", "OPTModel", {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 1024, "vocab_size": 2000, "word_embed_proj_dim": 256, "use_cache": False}, "ids"),
    "bloom": ("text", "BloomConfig", "BloomModel", {"hidden_size": 256, "n_layer": 4, "n_head": 4, "vocab_size": 2000, "use_cache": False}, "ids"),
    "llama": ("text", "LlamaConfig", "LlamaModel", DECODER, "ids"),
    "qwen2": ("text", "Qwen2Config", "Qwen2Model", DECODER, "ids"),
    "gemma": ("text", "GemmaConfig", "GemmaModel", DECODER | {"head_dim": 64}, "ids"),
    "phi": ("text", "PhiConfig", "PhiModel", DECODER, "ids"),
    "dinov2": ("attention", "Dinov2Config", "Dinov2Model", IMAGE, "image"),
    "siglip_vision": ("attention", "SiglipVisionConfig", "SiglipVisionModel", IMAGE, "image"),
    "clip_vision": ("attention", "CLIPVisionConfig", "CLIPVisionModel", IMAGE, "image"),
    "segformer": ("segmentation", "SegformerConfig", "SegformerForSemanticSegmentation", {"depths": [1, 1, 1, 1]}, "image"),
    "yolos": ("detection", "YolosConfig", "YolosForObjectDetection", IMAGE | {"image_size": [224, 224], "num_detection_tokens": 20}, "image"),
    "glpn": ("depth", "GLPNConfig", "GLPNForDepthEstimation", {"depths": [1, 1, 1, 1]}, "image"),
    "wav2vec2": ("audio", "Wav2Vec2Config", "Wav2Vec2Model", TEXT | {"conv_dim": [128] * 5, "conv_stride": [5, 2, 2, 2, 2], "conv_kernel": [10, 3, 3, 3, 3], "num_feat_extract_layers": 5}, "sound"),
    "audio_spectrogram": ("audio", "ASTConfig", "ASTModel", {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768, "max_length": 256}, "spectrogram"),
    "whisper_encoder": ("audio", "WhisperConfig", "WhisperModel", SPEECH | {"decoder_attention_heads": 3, "decoder_ffn_dim": 768, "max_source_positions": 300}, "mel"),
    "patchtst": ("time series", "PatchTSTConfig", "PatchTSTForPrediction", SERIES | {"d_model": 64}, "series"),
    "patchtsmixer": ("time series", "PatchTSMixerConfig", "PatchTSMixerForPrediction", SERIES | {"d_model": 64}, "series"),
}  # fmt: skip
WRITTEN = {"unet": "segmentation", "lstm": "recurrent", "gru": "recurrent", "diffusion_unet": "diffusion", "dit": "diffusion", "conv_tasnet": "audio", "char_cnn": "text", "mlp": "small products", "tcn": "time series"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Network:
    """One network: its structure, and where it comes from: "timm", "transformers" or "written"."""

    name: str
    structure: str
    source: str


def networks() -> dict[str, Network]:
    """All networks, by name."""
    found = [Network(name, structure, "timm") for structure, names in TIMM.items() for name in names]
    found += [Network(f"{name}_hf", structure, "transformers") for name, (structure, *_) in TRANSFORMERS.items()]
    found += [Network(name, structure, "written") for name, structure in WRITTEN.items()]
    return {n.name: n for n in found}
