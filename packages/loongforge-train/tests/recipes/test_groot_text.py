"""Prompts, tokenizers, and the layout of token rows."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge.recipes.gr00t_n1_6.layout import canonical_batch, layout_tokens
from loongforge.recipes.gr00t_n1_6.processing.text import (
    ByteTokenizer,
    FolderTokenizer,
    PromptBuilder,
    chat_prompt,
    formalise,
)


def test_instructions_lose_case_and_punctuation():
    assert formalise("Pick up the RED block, please!") == "pick up the red block please"
    assert formalise("Öffne_die Tür (2x)") == "öffne_die tür 2x"


def test_the_prompt_has_the_published_form():
    text = chat_prompt("go", [2, 1])
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\ngo<image 1><img><IMG_CONTEXT><IMG_CONTEXT></img>"
        "<image 2><img><IMG_CONTEXT></img><|im_end|>\n"
    )


def test_the_byte_tokenizer_has_one_id_per_byte_and_special_token():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [98, 0xC3 + 1, 0xA9 + 1]
    assert tokenizer.encode("<img><IMG_CONTEXT></img><|im_start|><|im_end|>") == [301, 300, 302, 303, 304]
    prompt = PromptBuilder(tokenizer).ids("Go!", [3])
    assert prompt.count(300) == 3
    assert max(prompt) < tokenizer.vocab_size


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A small tokenizer folder with the special tokens of the published one."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<IMG_CONTEXT>", "<img>", "</img>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet
    )
    inner.train_from_iterator(["pick up the red block please", "system user image"] * 20, trainer)
    inner.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_folder_keeps_special_tokens_whole(tokenizer_folder):
    tokenizer = FolderTokenizer(tokenizer_folder)
    ids = PromptBuilder(tokenizer).ids("Pick up the red block, please", [4, 4])
    assert ids.count(tokenizer.image_token_id) == 8
    assert ids[0] == tokenizer.encode("<|im_start|>")[0]
    assert tokenizer.pad_token_id == tokenizer.encode("<|endoftext|>")[0]


def test_the_wrong_tokenizer_is_refused(tokenizer_folder, tmp_path):
    with pytest.raises(ValueError, match="model expects 151669"):
        FolderTokenizer(tokenizer_folder, image_token_id=151669)
    with pytest.raises(ValueError, match="does not exist"):
        FolderTokenizer(tmp_path / "absent")


def test_golden_prompt_ids_of_the_published_tokenizer():
    folder = os.environ.get("LOONGFORGE_GROOT_TOKENIZER")
    if not folder:
        pytest.skip("set LOONGFORGE_GROOT_TOKENIZER to a folder with the published tokenizer files")
    ids = PromptBuilder(FolderTokenizer(folder)).ids("pick up the red block please", [81, 81])
    head = [151644, 8948, 198, 2610, 525, 264, 10950, 17847, 13, 151645, 198, 151644, 872, 198]
    text = [29245, 705, 279, 2518, 2504, 4486]
    first = [27, 1805, 220, 16, 29, 151670, *[151669] * 81, 151671]
    second = [27, 1805, 220, 17, 29, 151670, *[151669] * 81, 151671]
    assert ids == [*head, *text, *first, *second, 151645, 198]


def test_a_prompt_is_remembered_but_does_not_travel():
    prompts = PromptBuilder(ByteTokenizer())
    prompts.CACHED = 2
    ids = prompts.ids("go", [2])
    ids.append(0)
    assert prompts.ids("go", [2]) == ids[:-1]
    assert len(pickle.loads(pickle.dumps(prompts))._known) == 0
    for text in "abc":
        prompts.ids(text, [1])
    assert len(prompts._known) <= 2


# ---- layout ----------------------------------------------------------------------------------------------

rows_of_tokens = st.lists(
    st.lists(st.integers(1, 9), min_size=2, max_size=30).map(lambda row: [7, *row, 1]), min_size=1, max_size=4
)


@given(rows_of_tokens, st.sampled_from([None, 64]))
@settings(max_examples=50, deadline=None)
def test_index_tensors_find_every_token_once(rows, pad_to):
    layout = layout_tokens(rows, image_token_id=7, pad_token_id=0, pad_to=pad_to)
    assert layout.input_ids.shape[1] % 8 == 0
    assert layout.text_index.shape[1] % 8 == 0
    for i, row in enumerate(rows):
        assert layout.input_ids[i, : len(row)].tolist() == row
        assert layout.attention_mask[i].sum() == len(row)
        valid = (
            layout.image_valid[i]
            if layout.image_valid is not None
            else torch.ones_like(layout.image_index[i]).bool()
        )
        images = layout.image_index[i][valid].tolist()
        texts = layout.text_index[i][layout.text_valid[i]].tolist()
        assert images == [k for k, token in enumerate(row) if token == 7]
        assert sorted(images + texts) == list(range(len(row)))


def test_padding_on_the_left_becomes_padding_on_the_right():
    batch = {
        "input_ids": torch.tensor([[0, 0, 5, 7, 6], [5, 7, 7, 6, 6]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    }
    ours = canonical_batch(batch, image_token_id=7, pad_token_id=0)
    assert ours["input_ids"][0].tolist() == [5, 7, 6, 0, 0, 0, 0, 0]
    assert ours["image_valid"].tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("rows", "pad_to", "words"),
    [
        ([], None, "at least one row"),
        ([[1, 2]], None, "no image token"),
        ([[7, 7]], None, "no text token"),
        ([[7, 1, 2]], 2, "3 tokens but pad_to is 2"),
    ],
)
def test_impossible_rows_are_refused(rows, pad_to, words):
    with pytest.raises(ValueError, match=words):
        layout_tokens(rows, image_token_id=7, pad_token_id=0, pad_to=pad_to)
