"""Small random networks of timm, by name."""

from __future__ import annotations

import importlib

import torch

from tests.architectures.extras import extra


def images(size, channels=3):
    return lambda n: torch.randn(n, channels, size, size)


def named(name, size=32, **settings):
    def make():
        timm = extra("timm")
        torch.manual_seed(0)
        return timm.create_model(name, num_classes=5, **settings).eval(), images(size)

    return make


def direct(module, name, size=32, *, block=None, mlp=None, **settings):
    """Return a network of a class itself, where the functions fix its size."""

    def make():
        extra("timm")
        found = importlib.import_module(f"timm.models.{module}")
        for key, part in (("block_layer", block), ("mlp_layer", mlp)):
            if part is not None:
                settings[key] = getattr(found, part)
        torch.manual_seed(0)
        return getattr(found, name)(num_classes=5, **settings).eval(), images(size)

    return make


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}

NETWORKS = {
    "test_byobnet": named("test_byobnet", 48),
    "test_coatnet": named("test_coatnet", 64, img_size=64),
    "test_convnext": named("test_convnext", 64),
    "test_convnext2": named("test_convnext2", 64),
    "test_efficientnet": named("test_efficientnet", 48),
    "test_efficientnet_evos": named("test_efficientnet_evos", 48),
    "test_efficientnet_ln": named("test_efficientnet_ln", 48),
    "test_mambaout": named("test_mambaout", 64),
    "test_maxvit": named("test_maxvit", 64, img_size=64),
    "test_nfnet": named("test_nfnet", 48),
    "test_resnet": named("test_resnet", 48),
    "test_vit": named("test_vit", 32, img_size=32),
    "test_vit3": named("test_vit3", 32, img_size=32),
    "test_vit_relpos": named("vit_relpos_small_patch16_224", **_VIT),
    "vit_tiny": named("vit_tiny_patch16_224", **_VIT),
    "deit3": named("deit3_small_patch16_224", **_VIT),
    "beit": named("beit_base_patch16_224", **_VIT),
    "beitv2": named("beitv2_base_patch16_224", **_VIT),
    "eva02": named("eva02_tiny_patch14_224", **_VIT),
    "cait": named("cait_xxs24_224", **_VIT, depth_token_only=1),
    "xcit": named("xcit_nano_12_p8_224", 32, img_size=32, embed_dim=32, depth=2, num_heads=4),
    "swin": named("swin_tiny_patch4_window7_224", 32, img_size=32, window_size=4, patch_size=2, embed_dim=16, depths=(1, 1), num_heads=(2, 4)),
    "swinv2": named("swinv2_tiny_window8_256", 32, img_size=32, window_size=4, patch_size=2, embed_dim=16, depths=(1, 1), num_heads=(2, 4)),
    "swinv2_cr": named("swinv2_cr_tiny_224", 32, img_size=32, window_size=4, patch_size=2, embed_dim=16, depths=(1, 1), num_heads=(2, 4)),
    "twins": named("twins_svt_small", 64, img_size=64, embed_dims=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4]),
    "pvt_v2": named("pvt_v2_b0", 32, embed_dims=(8, 16, 16, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4)),
    "levit": named("levit_128s", 64, img_size=64, embed_dim=(16, 16, 32), depth=(1, 1, 1), num_heads=(2, 2, 4), key_dim=4),
    "efficientformer": named("efficientformer_l1", 224, embed_dims=(8, 16, 16, 32), depths=(1, 1, 1, 1), num_vit=1),
    "tiny_vit": named("tiny_vit_5m_224", 64, embed_dims=(8, 16, 16, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4)),
    "mobilenetv2_035": named("mobilenetv2_035"),
    "mobilenetv3_small": named("mobilenetv3_small_050"),
    "tf_mobilenetv3": named("tf_mobilenetv3_small_minimal_100"),
    "mobilenetv4": named("mobilenetv4_conv_small_035"),
    "mnasnet": named("mnasnet_050"),
    "lcnet": named("lcnet_035"),
    "ghostnet": named("ghostnet_050"),
    "efficientvit": named("efficientvit_b0", 64),
    "mobilevit": named("mobilevitv2_050", 64),
    "fastvit": named("fastvit_t8", 64, embed_dims=(8, 16, 16, 32), layers=(1, 1, 1, 1)),
    "repvit": named("repvit_m0_9", 32, embed_dim=(8, 16, 16, 32), depth=(1, 1, 1, 1)),
    "mixer": direct("mlp_mixer", "MlpMixer", img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
    "resmlp": direct("mlp_mixer", "MlpMixer", img_size=32, patch_size=8, embed_dim=32, num_blocks=2, block="ResBlock"),
    "gmlp": direct("mlp_mixer", "MlpMixer", img_size=32, patch_size=8, embed_dim=32, num_blocks=2, block="SpatialGatingBlock", mlp="GatedMlp"),
    "convmixer": direct("convmixer", "ConvMixer", dim=16, depth=2, kernel_size=5, patch_size=4),
    "poolformer": direct("metaformer", "MetaFormer", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "nest": direct("nest", "Nest", img_size=32, patch_size=2, num_levels=2, embed_dims=(16, 32), num_heads=(2, 4), depths=(1, 1)),
    "resnet10t": named("resnet10t", 32, channels=(8, 16, 16, 32), stem_width=8),
    "resnetv2": named("resnetv2_18", 32, channels=(8, 16, 16, 32), stem_chs=8, layers=(1, 1, 1, 1)),
    "seresnet": named("seresnet18", 32, channels=(8, 16, 16, 32)),
    "skresnet": named("skresnet18", 32, channels=(16, 16, 32, 32)),
    "regnetx": named("regnetx_002", 32),
    "regnety": named("regnety_002", 32),
    "densenet": named("densenet121", 32, growth_rate=8, block_config=(2, 2)),
    "vovnet": named("ese_vovnet19b_slim_dw", 32),
    "coat": named("coat_lite_tiny", 64, img_size=64, embed_dims=(8, 16, 16, 32), serial_depths=(1, 1, 1, 1)),
    "edgenext": named("edgenext_xx_small", 64, dims=(8, 16, 16, 32), depths=(1, 1, 1, 1)),
    "visformer": named("visformer_tiny", 64, img_size=64, embed_dim=32, depth=(1, 1, 1), num_heads=2),
    "sequencer": named("sequencer2d_s", 32, img_size=32, patch_sizes=(4, 2, 1, 1), layers=(1, 1, 1, 1), embed_dims=(8, 16, 16, 16), hidden_sizes=(4, 8, 8, 8)),
    "inception": named("inception_next_atto", 32),
    "starnet": named("starnet_s050", 32),
    "davit": named("davit_tiny", 64, embed_dims=(16, 16, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2)),
    "hiera": named("hiera_tiny_224", 64, img_size=(64, 64), embed_dim=16, stages=(1, 1, 1, 1)),
    "naflexvit": named("naflexvit_base_patch16_gap", 32, embed_dim=32, depth=2, num_heads=4, patch_size=8, img_size=32),
}  # fmt: skip
