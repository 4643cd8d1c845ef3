"""Small random networks of transformers, by name, each with a batch of its own kind."""

from __future__ import annotations

from functools import partial

import torch

from tests.architectures.extras import extra

VOCABULARY = 90
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}


def words(n, length=12):
    return {"input_ids": torch.randint(3, VOCABULARY, (n, length))}


def pairs(n):
    return {**words(n), "decoder_input_ids": torch.randint(3, VOCABULARY, (n, 7))}


def pixels(n, size=32):
    return {"pixel_values": torch.randn(n, 3, size, size)}


def sound(n):
    return {"input_values": torch.randn(n, 1600)}


def words_and_pixels(n):
    return {**words(n), "pixel_values": torch.randn(n, 3, 32, 32)}


def named(model, base=_SMALL, batch=words, *, config=None, seed=0, **changes):
    """Return a function that makes a network and a function that makes batches."""

    def make():
        transformers = extra("transformers")
        kind = getattr(transformers, config or _config_of(model))
        torch.manual_seed(seed)
        return getattr(transformers, model)(kind(**{**base, **changes})).eval(), batch

    return make


def _config_of(model):
    for ending in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "WithLMHeadModel",
                   "ForImageClassification", "ForSequenceClassification", "ForMaskedLM",
                   "ForSemanticSegmentation", "ForCTC", "ForQuestionAnswering", "Model",
                   "ForMultipleChoice", "ForObjectDetection", "ForAudioClassification"):  # fmt: skip
        if model.endswith(ending):
            return model.removesuffix(ending) + "Config"
    raise ValueError(model)


_decoder = named
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4,
            "n_routed_experts": 4, "moe_intermediate_size": 48}  # fmt: skip

NETWORKS = {
    # Decoders.
    "gpt2": named("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt-neo": named("GPTNeoForCausalLM", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8),
    "gpt-neox": named("GPTNeoXForCausalLM"),
    "gptj": named("GPTJForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    "gpt-bigcode": named("GPTBigCodeForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "opt": named("OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    "bloom": named("BloomForCausalLM", n_layer=2, n_head=4),
    "falcon": named("FalconForCausalLM"),
    "llama": named("LlamaForCausalLM"),
    "mistral": named("MistralForCausalLM"),
    "qwen2": named("Qwen2ForCausalLM"),
    "qwen3": named("Qwen3ForCausalLM", head_dim=8),
    "gemma": named("GemmaForCausalLM", head_dim=8),
    "gemma2": named("Gemma2ForCausalLM", head_dim=8),
    "gemma3": named("Gemma3ForCausalLM", config="Gemma3TextConfig", head_dim=8),
    "phi": named("PhiForCausalLM"),
    "phi3": named("Phi3ForCausalLM"),
    "stablelm": named("StableLmForCausalLM"),
    "olmo2": named("Olmo2ForCausalLM"),
    "cohere": named("CohereForCausalLM"),
    "granite": named("GraniteForCausalLM"),
    "starcoder2": named("Starcoder2ForCausalLM"),
    "smollm3": named("SmolLM3ForCausalLM"),
    "mpt": named("MptForCausalLM", d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "codegen": named("CodeGenForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    "biogpt": named("BioGptForCausalLM"),
    "xglm": named("XGLMForCausalLM", d_model=32, ffn_dim=64, num_layers=2, attention_heads=4),
    "ctrl": named("CTRLLMHeadModel", n_embd=32, dff=64, n_layer=2, n_head=4, n_positions=64),
    "openai-gpt": named("OpenAIGPTLMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    # State spaces and recurrences.
    "mamba": named("MambaForCausalLM", state_size=4, time_step_rank=4),
    "mamba2": named("Mamba2ForCausalLM", state_size=8, num_heads=8, head_dim=8, expand=2, n_groups=1, chunk_size=8),
    "falcon-mamba": named("FalconMambaForCausalLM", state_size=4, time_step_rank=4),
    "rwkv": named("RwkvForCausalLM", attention_hidden_size=32),
    "recurrent-gemma": named("RecurrentGemmaForCausalLM", lru_width=32, attention_window_size=8, num_hidden_layers=3),
    # Experts.
    "mixtral": named("MixtralForCausalLM", **_EXPERTS),
    "qwen3-moe": named("Qwen3MoeForCausalLM", head_dim=8, **_EXPERTS),
    "qwen2-moe": named("Qwen2MoeForCausalLM", shared_expert_intermediate_size=48, **_EXPERTS),
    "deepseek-v3": named("DeepseekV3ForCausalLM", first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_group=2, topk_group=1, num_key_value_heads=4, **_EXPERTS),
    "gpt-oss": named("GptOssForCausalLM", head_dim=8, **_EXPERTS),
    "jamba": named("JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4, **{**_EXPERTS, "moe_intermediate_size": 64}),
    "olmoe": named("OlmoeForCausalLM", **_EXPERTS),
    "phimoe": named("PhimoeForCausalLM", **_EXPERTS),
    "granite-moe": named("GraniteMoeForCausalLM", **_EXPERTS),
    "switch": named("SwitchTransformersForConditionalGeneration", batch=pairs, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0),
    # Encoders.
    "bert": named("BertForSequenceClassification"),
    "bert-mlm": named("BertForMaskedLM"),
    "roberta": named("RobertaForMaskedLM"),
    "distilbert": named("DistilBertForSequenceClassification", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    "albert": named("AlbertForSequenceClassification", embedding_size=16),
    "electra": named("ElectraForSequenceClassification", embedding_size=16),
    "deberta": named("DebertaForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta-v2": named("DebertaV2ForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "mobilebert": named("MobileBertForSequenceClassification", embedding_size=16, true_hidden_size=16, intra_bottleneck_size=16),
    "squeezebert": named("SqueezeBertForSequenceClassification", embedding_size=32),
    "mpnet": named("MPNetForSequenceClassification"),
    "xlnet": named("XLNetForSequenceClassification", {"vocab_size": VOCABULARY}, d_model=32, n_layer=2, n_head=4, d_inner=64),
    "fnet": named("FNetForSequenceClassification"),
    "nystromformer": named("NystromformerForSequenceClassification", num_landmarks=4, segment_means_seq_len=12),
    "longformer": named("LongformerForSequenceClassification", attention_window=4),
    "roformer": named("RoFormerForSequenceClassification", embedding_size=32),
    "modernbert": named("ModernBertForSequenceClassification", cls_token_id=1, sep_token_id=2),
    "funnel": named("FunnelForSequenceClassification", {"vocab_size": VOCABULARY}, d_model=32, n_head=4, d_head=8, d_inner=64, block_sizes=[1, 1]),
    "convbert": named("ConvBertForSequenceClassification", embedding_size=32),
    "ibert": named("IBertForSequenceClassification"),
    "big-bird": named("BigBirdForSequenceClassification", attention_type="original_full"),
    "canine": named("CanineForSequenceClassification", num_hash_buckets=64, local_transformer_stride=4, downsampling_rate=2),
    # Encoder-decoders.
    "t5": named("T5ForConditionalGeneration", batch=pairs, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "bart": named("BartForConditionalGeneration", batch=pairs, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64),
    "marian": named("MarianMTModel", config="MarianConfig", batch=pairs, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, decoder_start_token_id=0),
    "m2m-100": named("M2M100ForConditionalGeneration", batch=pairs, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64),
    "prophetnet": named("ProphetNetForConditionalGeneration", {"vocab_size": VOCABULARY, "hidden_size": 32, "decoder_start_token_id": 0, "pad_token_id": 0}, pairs, num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64),
    # Images.
    "vit": named("ViTForImageClassification", _VISION, pixels),
    "deit": named("DeiTForImageClassification", _VISION, pixels),
    "beit": named("BeitForImageClassification", _VISION, pixels),
    "data2vec-vision": named("Data2VecVisionForImageClassification", _VISION, pixels),
    "dinov2": named("Dinov2ForImageClassification", _VISION, pixels),
    "swin": named("SwinForImageClassification", {}, pixels, image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4, num_labels=5),
    "swinv2": named("Swinv2ForImageClassification", {}, pixels, image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4, num_labels=5),
    "convnext": named("ConvNextForImageClassification", {}, pixels, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], image_size=32, num_labels=5),
    "convnextv2": named("ConvNextV2ForImageClassification", {}, pixels, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], image_size=32, num_labels=5),
    "resnet": named("ResNetForImageClassification", {}, pixels, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5),
    "regnet": named("RegNetForImageClassification", {}, pixels, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, num_labels=5),
    "mobilenet-v1": named("MobileNetV1ForImageClassification", {}, pixels, depth_multiplier=0.25, image_size=32, num_labels=5),
    "mobilenet-v2": named("MobileNetV2ForImageClassification", {}, pixels, depth_multiplier=0.25, image_size=32, num_labels=5),
    "mobilevit": named("MobileViTForImageClassification", {}, pixels, image_size=32, hidden_sizes=[8, 16, 24], neck_hidden_sizes=[8, 8, 8, 8, 16, 24, 32], num_attention_heads=2, num_labels=5),
    "poolformer": named("PoolFormerForImageClassification", {}, pixels, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_labels=5),
    "segformer": named("SegformerForSemanticSegmentation", {}, pixels, hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2, num_attention_heads=[1, 2], sr_ratios=[2, 1], decoder_hidden_size=16, num_labels=5),
    "levit": named("LevitForImageClassification", {}, pixels, image_size=32, hidden_sizes=[16, 16, 16], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[4, 4, 4], drop_path_rate=0, num_labels=5),
    "pvt": named("PvtForImageClassification", {}, pixels, image_size=32, hidden_sizes=[8, 16, 16, 16], num_attention_heads=[1, 2, 2, 2], depths=[1, 1, 1, 1], num_labels=5),
    "efficientnet": named("EfficientNetForImageClassification", {}, pixels, image_size=32, width_coefficient=0.2, depth_coefficient=0.3, hidden_dim=256, num_labels=5),
    "focalnet": named("FocalNetForImageClassification", {}, pixels, image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3], num_labels=5),
    "bit": named("BitForImageClassification", {}, pixels, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=4, num_labels=5),
    "vit-mae": named("ViTMAEForPreTraining", {**_VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}, pixels, config="ViTMAEConfig"),
    "yolos": named("YolosForObjectDetection", {**_VISION, "image_size": [32, 32], "num_detection_tokens": 4}, pixels),
    "swiftformer": named("SwiftFormerForImageClassification", {}, partial(pixels, size=64), depths=[1, 1, 1, 1], embed_dims=[8, 16, 16, 32], num_labels=5),
    "dpt": named("DPTForSemanticSegmentation", {**_VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}, pixels),
    # Sound, series, several inputs.
    "wav2vec2": named("Wav2Vec2ForCTC", _SMALL, sound, conv_dim=[16, 16], conv_stride=[5, 4], conv_kernel=[10, 8], num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4),
    "hubert": named("HubertForCTC", _SMALL, sound, conv_dim=[16, 16], conv_stride=[5, 4], conv_kernel=[10, 8], num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4),
    "whisper": named("WhisperForConditionalGeneration", {**_SMALL, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20, "decoder_start_token_id": 1}, lambda n: {"input_features": torch.randn(n, 8, 20), "decoder_input_ids": torch.randint(3, VOCABULARY, (n, 7))}),
    "ast": named("ASTForAudioClassification", {**_VISION, "max_length": 24, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}, lambda n: {"input_values": torch.randn(n, 24, 16)}),
    "clip": named("CLIPModel", {"text_config": {**_SMALL, "projection_dim": 16}, "vision_config": {**_VISION, "projection_dim": 16}, "projection_dim": 16}, words_and_pixels),
    "siglip": named("SiglipModel", {"text_config": _SMALL, "vision_config": _VISION}, words_and_pixels),
    "vilt": named("ViltModel", {**_SMALL, **_VISION}, words_and_pixels),
    "patchtst": named("PatchTSTForPrediction", {}, lambda n: {"past_values": torch.randn(n, 32, 2)}, config="PatchTSTConfig", num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, d_model=16, num_attention_heads=2, ffn_dim=32, num_hidden_layers=2, prediction_length=4),
    "perceiver": named("PerceiverForSequenceClassification", _SMALL, words, num_latents=8, d_latents=32, d_model=32, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4),
}  # fmt: skip
EXPERTS = ("mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss", "jamba")
