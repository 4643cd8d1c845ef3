"""Texts to tokens: rows of one length for decoders, padded texts for all others."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lobs.errors import DataError
from lobs.zoo.hub.libraries import library, quietly
from lobs.zoo.hub.source import Source

_LENGTH, _SHORT = 512, 128  # tokens of a row for decoders, and of a text elsewhere
_PIECE = 100_000  # characters that are encoded at a time
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")
_RESERVED = 2  # positions that some encoders keep for padding
_SPEECH_STEPS = 8  # tokens of a decoder whose text is not known


class Tokens:
    """A folder's tokenizer and the length of its rows."""

    def __init__(self, source: Source, length: int | None) -> None:
        self.source, self.size = source, Tokens.length(source, length)
        if source.input_name != "input_ids":
            raise DataError(
                f"{source.architecture} takes {source.input_name}, not text: give a folder of "
                "images or a .npy file."
            )
        self.tokenizer = tokenizer_of(source)

    @staticmethod
    def length(source: Source, asked: int | None) -> int:
        """Return the length of a row, at most what the network's positions allow."""
        most = next((getattr(source.settings, k) for k in _LIMITS if hasattr(source.settings, k)),
                    None)  # fmt: skip
        if source.task != "causal" and most:
            most -= _RESERVED
        if asked is not None:
            if most and asked > most:
                raise DataError(f"length is {asked}, but the network has {most} positions.")
            return asked
        usual = _LENGTH if source.task == "causal" else _SHORT
        return min(usual, most) if most else usual

    def chunks(self, texts: Sequence[str], most: int | None) -> list[Tensor]:
        """Return rows of one length from the texts, joined; a rest is dropped.

        Args:
            texts: the texts. An end-of-text token joins them where the tokenizer has one.
            most: rows after which reading stops; None reads all.
        """
        first = self.tokenizer("")["input_ids"]
        first = [t for t in first if t == self.tokenizer.bos_token_id][:1]
        end, size = self.tokenizer.eos_token_id, self.size - len(first)
        rows: list[Tensor] = []
        held: list[int] = []
        for text in texts:
            for piece in _pieces(text):
                with quietly():
                    held += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
                while len(held) >= size:
                    rows.append(torch.tensor(first + held[:size]))
                    held = held[size:]
                    if most is not None and len(rows) >= most:
                        return rows
            held += [] if end is None or len(texts) == 1 else [end]
        if not rows:
            raise DataError(
                f"the data hold {len(held)} tokens, fewer than one row of {self.size}: give more "
                "text, or a smaller length."
            )
        return rows

    def packed(self, rows: list[Tensor]) -> dict[str, Tensor]:
        """Return a batch of rows of one length."""
        ids = torch.stack(rows)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def padded(self, texts: list[str]) -> dict[str, Tensor]:
        """Return a batch of texts, cut to the length and padded."""
        with quietly():
            found = self.tokenizer(
                texts, truncation=True, max_length=self.size, padding=True, return_tensors="pt"
            )
        known = inspect.signature(self.source.network_class.forward).parameters
        batch = {name: value for name, value in found.items() if name in known}
        return Tokens.with_decoder(self.source, batch)

    @staticmethod
    def with_decoder(source: Source, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the tokens of the decoder, where there is one: the text itself, moved by one.

        The decoder's row is one shorter, so that both sides keep their own padding.
        """
        if source.task != "seq2seq":
            return batch
        start = getattr(source.settings, "decoder_start_token_id", None)
        start = source.settings.pad_token_id if start is None else start
        ids = batch.get("input_ids")
        if ids is None:
            main = next(iter(batch.values()))
            ids = torch.full((len(main), _SPEECH_STEPS), start or 0)
            return {**batch, "decoder_input_ids": ids}
        width = max(1, ids.shape[1] - 1)
        moved = ids[:, :width].roll(1, dims=1)
        moved[:, 0] = start or 0
        mask = batch["attention_mask"][:, :width]
        return {**batch, "decoder_input_ids": moved, "decoder_attention_mask": mask}


def tokenizer_of(source: Source) -> Any:
    """Return a folder's tokenizer; it pads with the end of text if it has no padding."""
    try:
        with quietly():
            found = library("transformers").AutoTokenizer.from_pretrained(
                str(source.folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers raises whatever it meets
        raise DataError(
            f"'{source.folder}' holds no tokenizer that transformers can read: add its files, or "
            "give tokens as a .npy file of (samples, length)."
        ) from error
    if found.pad_token is None and found.eos_token is not None:
        found.pad_token = found.eos_token
    return found


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text at ends of lines, so that reading can stop early."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start + _PIECE) + 1 or len(text)
        yield text[start:stop]
        start = stop
