from __future__ import annotations

import pytest
import torch

from lobs import LobsError, zoo
from lobs.storage import checkpoint
from lobs.zoo.classics import VGG16, AlexNet
from lobs.zoo.resnet import ResNet50

# A few of torchvision's names, with their shapes: its checkpoints must load as they are.
NAMES = {
    "alexnet": {
        "features.0.weight": (64, 3, 11, 11),
        "features.10.bias": (256,),
        "classifier.1.weight": (4096, 9216),
        "classifier.6.bias": (1000,),
    },
    "vgg16": {
        "features.0.weight": (64, 3, 3, 3),
        "features.28.weight": (512, 512, 3, 3),
        "classifier.0.weight": (4096, 25088),
        "classifier.6.weight": (1000, 4096),
    },
    "resnet50": {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer4.2.conv2.weight": (512, 512, 3, 3),
        "layer2.0.downsample.1.running_var": (512,),
        "layer3.5.bn3.num_batches_tracked": (),
        "fc.weight": (1000, 2048),
    },
}


@pytest.mark.parametrize(("name", "tensors"), [("alexnet", 16), ("vgg16", 32), ("resnet50", 320)])
def test_parameters_have_torchvisions_names(name, tensors):
    with torch.device("meta"):
        state = zoo.entry(name).build().state_dict()
    assert len(state) == tensors
    for key, shape in NAMES[name].items():
        assert tuple(state[key].shape) == shape


@pytest.mark.parametrize("build", [AlexNet, VGG16, ResNet50])
def test_an_image_becomes_class_scores(build):
    with torch.device("meta"):
        assert build(classes=7)(torch.zeros(2, 3, 224, 224)).shape == (2, 7)


def test_both_forms_of_resnet_take_the_same_weights_and_compute_different_things():
    torch.manual_seed(0)
    first, second = ResNet50(form="v1").eval(), ResNet50(form="v1.5").eval()
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        a, b = first(x), second(x)
    assert a.shape == b.shape and not torch.allclose(a, b)
    assert first.get_submodule("layer2.0.conv1").stride == (2, 2) and second.get_submodule(
        "layer2.0.conv2"
    ).stride == (2, 2)


def test_weights_come_from_the_data_folder_in_any_precision(tmp_path, monkeypatch):
    small = zoo.entry("lenet300")
    monkeypatch.setitem(
        zoo.ZOO, "mine", zoo.Entry(small.build, None, {}, "Mine", source="Make it.")
    )
    model = zoo.fresh("lenet300", 3)
    halves = {name: t.half() for name, t in model.state_dict().items()}
    checkpoint.save(halves, tmp_path / "mine-imagenet.safetensors")
    monkeypatch.setenv("LOBS_DATA", str(tmp_path))
    loaded = zoo.trained("mine")
    assert loaded.fc1.weight.dtype == torch.float32 and torch.equal(
        loaded.fc1.weight, model.fc1.weight.half().float()
    )
    monkeypatch.delenv("LOBS_DATA")
    with pytest.raises(LobsError, match=r"Put 'mine.safetensors' into a folder .* Make it\."):
        zoo.trained("mine")
