"""Compute `nn.MultiheadAttention` step by step, so that each projection can be observed.

The module itself calls one function that contains all its projections. While a layer is observed,
`ObservedAttention` replaces the instance's `forward`. It follows torch's rules for masks, hints and
options. It is removed with the last observer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name


class ObservedAttention:
    """Replace an attention's `forward` by one that calls observers at every projection."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        self.module = module
        self.inputs: dict[str, list[Any]] = {role: [] for role in ("q", "k", "v", "out")}
        self.outputs: dict[str, list[Any]] = {role: [] for role in ("q", "k", "v", "out")}

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> ObservedAttention:
        """Return the replacement of a module, and install it where there is none yet."""
        found = module.__dict__.get("forward")
        if not isinstance(found, cls):
            found = cls(module)
            module.__dict__["forward"] = found
        return found

    def remove_if_unused(self) -> None:
        """Restore the module's own `forward` after the last observer has gone."""
        if not any(self.inputs.values()) and not any(self.outputs.values()):
            self.module.__dict__.pop("forward", None)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what `nn.MultiheadAttention.forward` computes."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is only a hint about attn_mask, and there is none.")
        batched = query.dim() == 3
        q, k, v = (
            self._batch_first(self._project(role, x), batched)
            for role, x in zip("qkv", (query, key, value), strict=True)
        )
        # Torch uses the hint only where no mask is needed at all.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q)
        k, v, mask = self._extend(k, v, mask)
        heads, weights = self._attend(
            self._split(q), self._split(k), self._split(v), mask, need_weights, causal
        )
        joined = heads.transpose(1, 2).flatten(2)
        out = self._project("out", self._back(joined, batched))
        if weights is None:
            return out, None
        weights = weights.mean(dim=1) if average_attn_weights else weights
        return out, weights if batched else weights.squeeze(0)

    def _project(self, role: str, x: Tensor) -> Tensor:
        for observer in list(self.inputs[role]):
            observer(x)
        z = F.linear(x, *self._parameters(role))
        for observer in list(self.outputs[role]):
            replaced = observer(z)
            z = z if replaced is None else replaced
        return z

    def _parameters(self, role: str) -> tuple[Tensor, Tensor | None]:
        m = self.module
        if role == "out":
            return m.out_proj.weight, m.out_proj.bias
        third = "qkv".index(role)
        bias = None if m.in_proj_bias is None else m.in_proj_bias.chunk(3)[third]
        packed = m.in_proj_weight
        return getattr(m, f"{role}_proj_weight") if packed is None else packed.chunk(3)[third], bias

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.module.batch_first else x.transpose(0, 1)

    def _back(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.squeeze(0)
        return x if self.module.batch_first else x.transpose(0, 1)

    def _split(self, x: Tensor) -> Tensor:
        """Reshape (batch, length, width) to (batch, heads, length, width of a head)."""
        return x.reshape(*x.shape[:2], self.module.num_heads, self.module.head_dim).transpose(1, 2)

    def _mask(self, attention: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Combine both masks into one to add to scores (batch, heads, targets, sources)."""
        total: Tensor | None = None
        if attention is not None:
            total = _additive(attention, q.dtype)
            each_head = total.dim() == 3
            total = (
                total.reshape(len(q), self.module.num_heads, *total.shape[1:])
                if each_head
                else total[None, None]
            )
        if padding is not None:
            more = _additive(padding, q.dtype).reshape(len(q), 1, 1, -1)
            total = more if total is None else total + more
        return total

    def _extend(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the sources that every target may attend to: a learned one, and zero."""
        m = self.module
        extra = 0
        if m.bias_k is not None and m.bias_v is not None:
            k, v = (
                torch.cat([x, b.expand(len(x), 1, -1)], dim=1)
                for x, b in ((k, m.bias_k), (v, m.bias_v))
            )
            extra += 1
        if m.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        return k, v, None if mask is None else F.pad(mask, (0, extra))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.module.dropout if self.module.training else 0.0
        if not need_weights:
            mask = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        weights = F.dropout(weights, dropout) if dropout > 0 else weights
        return weights @ v, weights


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add to the scores; True in a boolean mask becomes −∞."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
