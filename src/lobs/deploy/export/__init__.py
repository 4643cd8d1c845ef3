"""Hand pruned networks to other programs: ONNX, torch.export, 2:4 tensors, torch.nn.utils.prune."""

from __future__ import annotations

from lobs.deploy.export.onnx_file import OnnxFile, export_onnx
from lobs.deploy.export.program import export_program
from lobs.deploy.export.semi_structured import broken_groups, to_semi_structured
from lobs.deploy.export.sizes import dense_sizes
from lobs.deploy.export.torch_prune import from_torch_prune, to_torch_prune

__all__ = [
    "OnnxFile",
    "broken_groups",
    "dense_sizes",
    "export_onnx",
    "export_program",
    "from_torch_prune",
    "to_semi_structured",
    "to_torch_prune",
]
