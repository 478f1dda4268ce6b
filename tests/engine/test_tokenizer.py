"""The same ids and chats as transformers, and as a slow and obvious BPE."""

from __future__ import annotations

import itertools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.gguf_weights import open_gguf
from gpu_backend.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tests.engine.conftest import LoadedModel

regex: Any = pytest.importorskip("regex")  # comes with transformers

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces,   three\ttab\n\n\nlines \r\n trailing   ",
    "In 2024 it cost $1,234.56 (or 12% of 0x1F); 3rd, 4th",
    "I'm sure they'll say we've won, it's DON'T",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # ok\n\n\tpass\n",
    '<div class="a">&amp;</div> {"k": [1, 2.5e-3, null]}',
    "naïve café, Zürich, Łódź, Ångström, e\u0301",
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 مرحبا שלום हिन्दी ไทย",
    "👩‍👩‍👧‍👦 👍🏽 🇨🇭 ∑∫√ ½ Ⅷ ٣٤ ²",
    "a" * 100 + "1" * 20 + " " * 20 + "!" * 20,
    "\u00a0nbsp\u200bzero\ufeffbom\x00nul\x7f",
    "<|im_start|>user\nhi<|im_end|> <|im_end |> <|endoftext|>x",
    "https://example.org/a_b-c?d=e&f=%20#g user@host snake_case CamelCase",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2? <|im_end|>"},
        {"role": "assistant", "content": "4", "tool_calls": None},
        {"role": "user", "content": " Danke, Zoë \n"},
    ],
]


# SmolLM2, out of the GGUF file.


class SlowBPE:
    """Byte-pair encoding as its paper says it, for SmolLM2: special tokens, digits, words, merges."""

    WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

    def __init__(self, path: Path) -> None:
        file = open_gguf(path)
        tokens = file.get("tokenizer.ggml.tokens")
        kinds = file.get("tokenizer.ggml.token_type")
        self.ids = {token: i for i, token in enumerate(tokens)}
        merges = file.get("tokenizer.ggml.merges")
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
        self.special = "(" + "|".join(map(regex.escape, sorted(special, key=len)[::-1])) + ")"
        # GPT-2's bytes as printable characters: those that are, then the rest from 256 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in printable]
        self.letters = {byte: chr(byte) for byte in printable}
        self.letters |= {byte: chr(256 + i) for i, byte in enumerate(rest)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(regex.split(self.special, text)):
            if i % 2:
                ids.append(self.ids[part])
                continue
            for piece in regex.split(r"(\p{N})", part):
                for word in regex.findall(self.WORDS, piece):
                    ids += self.word(word)
        return ids

    def word(self, word: str) -> list[int]:
        parts = [self.letters[byte] for byte in word.encode()]
        while True:
            ranked = [
                (self.ranks[pair], i)
                for i, pair in enumerate(itertools.pairwise(parts))
                if pair in self.ranks
            ]
            if not ranked:
                # Bytes that no text of the training had (those of unassigned planes) have no token.
                return [self.ids[part] for part in parts if part in self.ids]
            _, i = min(ranked)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def slow(smollm2_path: Path) -> SlowBPE:
    return SlowBPE(smollm2_path)


def test_ids_are_those_of_a_slow_bpe(tokenizer: Tokenizer, slow: SlowBPE) -> None:
    for text in TEXTS:
        assert tokenizer.encode(text) == slow.encode(text), text


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_ids_of_any_text_are_those_of_a_slow_bpe(
    tokenizer: Tokenizer, slow: SlowBPE, text: str
) -> None:
    assert tokenizer.encode(text) == slow.encode(text)


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    words = [tokenizer.decode([i]) for i in tokenizer.encode("in 2024")]
    assert words == ["in", " ", "2", "0", "2", "4"]


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_left_out_of_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "a"


def test_what_the_file_says_beside_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode(
        "a", add_special_tokens=False
    )


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="character 2 of the text is half of a surrogate"):
        tokenizer.encode("ab\ud83d")


def write_folder(folder: Path, tokenizer: Tokenizer, **settings: Any) -> None:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_folder_gives_the_ids_and_chats_of_transformers(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_folder(tmp_path, tokenizer, chat_template=tokenizer.chat_template)
    ours = load_tokenizer(tmp_path)
    theirs = hf.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    for chat in CHATS:
        for prompt in (True, False):
            options: dict[str, Any] = {"add_generation_prompt": prompt}
            want = theirs.apply_chat_template(chat, tokenize=False, **options)
            assert ours.apply_chat_template(chat, **options) == want
            want = theirs.apply_chat_template(chat, return_dict=False, **options)
            assert ours.encode_chat(chat, **options) == want
            assert tokenizer.encode_chat(chat, **options) == want


def test_a_chat_of_smollm2(smollm2: LoadedModel) -> None:
    text = smollm2.tokenizer.apply_chat_template(CHATS[0])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


# Other vocabularies, written as GGUF files and read by both.


def write_vocabulary(
    path: Path, model: str, tokens: list[str], kinds: list[int] | None = None, **values: Any
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds or [1] * len(tokens))
    for key, value in values.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small_bpe() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary of some 600 tokens, and its merges, learned from the texts above."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 2, trainer)
    learned = json.loads(backend.to_str())["model"]
    tokens = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    # No merges lead to "qz".
    return [*tokens, "qz", "<s>", "</s>", "<think>"], [" ".join(pair) for pair in learned["merges"]]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_other_ways_to_cut_words(
    pre: str, small_bpe: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    tokens, merges = small_bpe
    bos, kinds = len(tokens) - 3, [1] * (len(tokens) - 3) + [3, 3, 4]
    path = write_vocabulary(
        tmp_path / "v.gguf",
        "gpt2",
        tokens,
        kinds,
        tokenizer_pre=pre,
        token_merges=merges,
        bos_token_id=bos,
        eos_token_id=bos + 1,
        eot_token_id=bos,
    )
    ours = load_tokenizer(path)
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path, gguf_file="v.gguf")
    # The class that transformers uses for these files adds GPT-2's <|endoftext|> of its own accord.
    for text in [*(t for t in TEXTS if "<|endoftext|>" not in t), "<s>a</s> <think>b"]:
        composed = text.replace("e\u0301", "é") if pre == "qwen2" else text
        want = theirs(composed, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == want, text
    # Only Llama 3 takes a word that is a token whatever the merges make of it.
    assert (ours.encode("qz", add_special_tokens=False) == [bos - 1]) == (pre == "llama-bpe")
    # llama.cpp's default for files that do not say: Llama 3 starts with BOS, the others do not.
    assert (ours.encode("a")[0] == bos) == (pre == "llama-bpe")
    assert ours.eos_token_ids == (bos + 1, bos)
    assert ours.decode(ours.encode("<s>a<think>")) == "a<think>"


def test_sentencepiece_vocabularies(tmp_path: Path) -> None:
    words = ["▁the", "▁t", "he", "▁h", "▁he", "el", "lo", "▁hel", "▁hello", "▁▁", "in", "▁in", "11"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,1"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))]
    path = write_vocabulary(
        tmp_path / "v.gguf",
        "llama",
        tokens,
        kinds,
        token_scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
    )
    ours = load_tokenizer(path)
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path, gguf_file="v.gguf")
    for text in ("hello the inn", "the  lone é 1111, 👍.", "", "a"):
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == text
    assert [tokens[i] for i in ours.encode("hello é")] == [
        "<s>", "▁hello", "▁", "<0xC3>", "<0xA9>"
    ]  # fmt: skip
    # SentencePiece puts its space before any text, also before one that starts with a space.
    assert [tokens[i] for i in ours.encode(" hello")] == ["<s>", "▁", "▁hello"]


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("bert", {}, "tokenizer.ggml.model is 'bert', expected gpt2 or llama"),
        ("gpt2", {}, "no tokenizer.ggml.merges"),
        ("gpt2", {"token_merges": ["a b"], "tokenizer_pre": "viking"}, "pre is 'viking', expected"),
        ("llama", {}, "no tokenizer.ggml.scores"),
    ],
)
def test_a_vocabulary_it_cannot_read_is_refused(
    model: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", model, ["a", "b", "ab"], **values)
    with pytest.raises(TokenizerError, match=r"v\.gguf: ") as caught:
        load_tokenizer(path)
    assert message in str(caught.value)


# Folders.


@pytest.fixture
def folder(tmp_path: Path, small_bpe: tuple[list[str], list[str]]) -> Path:
    """A folder as some are published: objects for tokens, ids here and there, leftovers."""
    tokens, merges = small_bpe
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(pair.split(" ")[0], pair.split(" ")[1]) for pair in merges],
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
            {"name": "tool_use", "template": "{{ tools | tojson }}"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_prompts_are_never_cut_or_filled(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "In 2024 it cost"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 3 < len(tokenizer.encode(text)) != 9


def test_end_of_sequence_ids_of_the_files(folder: Path) -> None:
    end = load_tokenizer(folder).backend.token_to_id("</s>")
    assert load_tokenizer(folder).eos_token_ids == (end,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(folder).eos_token_ids == (7, end)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, end]}))
    assert load_tokenizer(folder).eos_token_ids == (5, end)


def test_templates_by_name_and_in_files(folder: Path) -> None:
    chat = [{"role": "user", "content": "é<b>"}]
    assert load_tokenizer(folder).apply_chat_template(chat) == "<s>é<b>"
    tools = [{"name": "é<b>"}]
    assert load_tokenizer(folder).apply_chat_template(chat, tools=tools) == '[{"name": "é<b>"}]'
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ flag }}")
    assert load_tokenizer(folder).apply_chat_template(chat, flag=3) == "</s>3"


def with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def test_what_templates_may_use(folder: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template = """
        {%- for m in messages %}
            {%- if loop.index0 == 2 %}{% break %}{% endif %}
            {%- generation %}{{ m.role }}:{{ m.content }};{% endgeneration %}
        {%- endfor %}
        {{- strftime_now('%Y') }}{% if add_generation_prompt %}!{% endif %}"""
    year = datetime.now().year
    for prompt, end in ((True, "!"), (False, "")):
        text = with_template(folder, template).apply_chat_template(
            [*chat, *chat], add_generation_prompt=prompt
        )
        assert text == f"user:a;assistant:b;{year}{end}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "messages: roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "has no attribute 'missing'"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "messages: "),
    ],
)
def test_templates_that_refuse_or_break_give_one_line(
    template: str, message: str, folder: Path
) -> None:
    with pytest.raises(TokenizerError, match=r"^the chat template refuses the ") as caught:
        with_template(folder, template).apply_chat_template(CHATS[0])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_chats_that_are_none_are_refused(folder: Path, small_bpe: Any) -> None:
    tokenizer = load_tokenizer(folder)
    with pytest.raises(TokenizerError, match="no messages"):
        tokenizer.apply_chat_template([])
    with pytest.raises(TokenizerError, match=r"message 1: \{'content': 'x'\}, expected an object"):
        tokenizer.apply_chat_template([*CHATS[0], {"content": "x"}])
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="this model has no chat template"):
        load_tokenizer(folder).apply_chat_template(CHATS[0])


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
