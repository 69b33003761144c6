"""Prompts: language formalisation, chat format, tokenizers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, cast

SYSTEM_PROMPT = "You are a helpful assistant."
_UNWANTED = re.compile(r"[^\w\s]")


class PromptTokenizer(Protocol):
    """What a prompt needs from a tokenizer; special tokens inside the text become single ids."""

    image_token_id: int
    pad_token_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without adding anything."""
        ...


def formalise(text: str) -> str:
    """Lower-case the instruction and drop all but word characters and white space."""
    return _UNWANTED.sub("", text.lower())


def chat_prompt(instruction: str, image_tokens: Sequence[int]) -> str:
    """Return the chat text of one sample.

    Args:
        instruction: Formalised instruction.
        image_tokens: Number of tokens of each image, in order.
    """
    images = "".join(
        f"<image {number}><img>{'<IMG_CONTEXT>' * count}</img>"
        for number, count in enumerate(image_tokens, 1)
    )
    return (
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{instruction}{images}<|im_end|>\n"
    )


class ByteTokenizer:
    """Stand-in tokenizer of the tiny recipe: one id per UTF-8 byte, no vocabulary file.

    Not the tokenizer of the published checkpoint: use :class:`FolderTokenizer` with that.
    """

    SPECIALS: ClassVar[Mapping[str, int]] = {
        "<IMG_CONTEXT>": 300,
        "<img>": 301,
        "</img>": 302,
        "<|im_start|>": 303,
        "<|im_end|>": 304,
    }
    image_token_id = 300
    pad_token_id = 0
    vocab_size = 320

    def __init__(self) -> None:
        self._split = re.compile("(" + "|".join(map(re.escape, self.SPECIALS)) + ")")

    def encode(self, text: str) -> list[int]:
        """Return one id per byte (1..256) and one per special token."""
        ids: list[int] = []
        for part in self._split.split(text):
            if part in self.SPECIALS:
                ids.append(self.SPECIALS[part])
            else:
                ids.extend(byte + 1 for byte in part.encode())
        return ids


class FolderTokenizer:
    """Tokenizer files from a local folder, read by transformers; nothing is fetched."""

    def __init__(self, folder: str | Path, *, image_token_id: int | None = None) -> None:
        from transformers import AutoTokenizer

        path = Path(folder)
        if not path.is_dir():
            msg = (
                f"tokenizer folder {path} does not exist; give a folder with tokenizer.json or vocab.json "
                "and merges.txt, for instance the processor folder of the checkpoint"
            )
            raise ValueError(msg)
        self._inner = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        self.vocab_size = len(self._inner)
        self.image_token_id = self._special("<IMG_CONTEXT>")
        if image_token_id is not None and image_token_id != self.image_token_id:
            msg = (
                f"the tokenizer in {path} gives <IMG_CONTEXT> the id {self.image_token_id}, the model "
                f"expects {image_token_id}; use the tokenizer that belongs to the checkpoint"
            )
            raise ValueError(msg)
        pad = self._inner.pad_token_id
        self.pad_token_id = int(pad) if pad is not None else self._special("<|endoftext|>")

    def _special(self, token: str) -> int:
        ids = self._inner.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            msg = (
                f"the tokenizer splits the special token {token} into {len(ids)} ids; "
                "its added_tokens are missing, use the folder that belongs to the checkpoint"
            )
            raise ValueError(msg)
        return int(ids[0])

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return cast(list[int], self._inner.encode(text, add_special_tokens=False))


class PromptBuilder:
    """Token ids of whole prompts; equal instructions are tokenised once.

    Travels to worker processes without what it has cached.
    """

    CACHED = 4096
    """Instructions that are remembered; more of them start the memory anew."""

    def __init__(self, tokenizer: PromptTokenizer, *, formalise_language: bool = True) -> None:
        self.tokenizer = tokenizer
        self.formalise_language = formalise_language
        self._known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def ids(self, instruction: str, image_tokens: Sequence[int]) -> list[int]:
        """Return the prompt of ``instruction`` with images of ``image_tokens`` tokens each."""
        key = (instruction, tuple(image_tokens))
        known = self._known.get(key)
        if known is None:
            text = formalise(instruction) if self.formalise_language else instruction
            known = self.tokenizer.encode(chat_prompt(text, image_tokens))
            if len(self._known) >= self.CACHED:
                self._known.clear()
            self._known[key] = known
        return list(known)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_known": {}}
