"""Text to token ids and back, and chat templates.

Tokenizers come from a Hugging Face folder (``tokenizer.json``) or from the vocabulary in a GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.lookup import read_json_object
from gpu_backend.gguf_weights import GGUFFile, open_gguf

if TYPE_CHECKING:
    import tokenizers

Message = Mapping[str, Any]
"""One turn of a chat: at least ``role`` and, as a rule, ``content``."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {"llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
"""``tokenizer.ggml.pre`` -> the expression that cuts text into words (from the models'
``tokenizer.json``)."""
_SPLITS_DIGITS = ("smollm", "starcoder", "refact", "codeshell", "command-r")
_GPT2_WORDS = ("gpt-2", "default", "olmo", "mpt")


class TokenizerError(ValueError):
    """A tokenizer that cannot be built, or text or a chat that it cannot take."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A ``tokenizers.Tokenizer`` and what its model's files say beside it."""

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...]
    """Any of them ends an output."""
    special_tokens: Mapping[str, str]
    """``bos_token``, ``eos_token``, ...: what chat templates may name."""
    chat_template: str | None = None
    tool_template: str | None = None
    """For chats with tools, where the model has a template of its own for them."""

    @property
    def vocab_size(self) -> int:
        """Ids that stand for a token (a model's logits may be padded to more)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; special tokens spelled out in it are recognised.

        ``add_special_tokens`` puts those around it that the model expects around a plain prompt
        (BOS for Llama). Bytes that a vocabulary has no token for are dropped, as in transformers.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"character {error.start} of the text is half of a surrogate pair, "
                "expected text that UTF-8 can write"
            ) from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of whole sequences; bytes that are no UTF-8 become U+FFFD, ids of no token nothing."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Ids of ``apply_chat_template``, whose text has all special tokens in it already."""
        text = self.apply_chat_template(messages, **options)
        return self.encode(text, add_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The chat as one text, with the beginning of the answer (``add_generation_prompt``).

        ``variables`` reach the template (``enable_thinking=False``). Raises ``TokenizerError`` where
        there is no template, or where it refuses the messages.
        """
        import jinja2

        if not messages:
            raise TokenizerError("no messages, expected at least one")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise TokenizerError(
                    f"message {i}: {message!r:.60}, expected an object with a role"
                )
        template = self.tool_template if tools and self.tool_template else self.chat_template
        if template is None:
            raise TokenizerError("this model has no chat template")
        context = {
            "messages": [_without_nulls(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _compile(template)(**{**self.special_tokens, **context, **variables})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise TokenizerError(f"the chat template refuses the messages: {error}") from None


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder or GGUF file that ``weights.find_model`` returned.

    Raises ``TokenizerError`` that says what is missing or not known.
    """
    return _from_folder(path) if path.is_dir() else _from_gguf(open_gguf(path))


# Chat templates.


def _without_nulls(message: Message) -> dict[str, Any]:
    """As transformers does: clients send ``content: null``, and templates would print "None"."""
    return {key: value for key, value in message.items() if value is not None}


@lru_cache(maxsize=8)
def _compile(template: str) -> Callable[..., str]:
    return _environment().from_string(template).render  # type: ignore[no-any-return]


def _environment() -> Any:
    """What transformers gives a template: templates are written, and tested, against that.

    Sandboxed: a template comes with a model and is not trusted.
    """
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what training learns; here it only prints its body."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 reads a class attribute)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes HTML, which models were not trained on.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


# From a Hugging Face folder.


def _from_folder(folder: Path) -> Tokenizer:
    import tokenizers

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{folder}: no tokenizer.json (older formats are not read)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise TokenizerError(f"{file}: not a tokenizer ({error})") from None
    # Left in some files by training; a prompt is never cut or filled.
    backend.no_truncation()
    backend.no_padding()
    # The map is where older files keep them.
    settings = {
        **_read(folder / "special_tokens_map.json"),
        **_read(folder / "tokenizer_config.json"),
    }
    special = {
        name: _content(settings[name]) for name in _SPECIAL_NAMES if settings.get(name) is not None
    }
    template, tool_template = _templates(folder, settings.get("chat_template"))
    return Tokenizer(
        backend=backend,
        eos_token_ids=_eos_ids(folder, backend, special),
        special_tokens=special,
        chat_template=template,
        tool_template=tool_template,
    )


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file, "a JSON object") if file.is_file() else {}


def _content(token: Any) -> str:
    """``"</s>"``, or the same as an object with flags."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _templates(folder: Path, given: Any) -> tuple[str | None, str | None]:
    """The default template and the one for tools; files of their own come first."""
    named: dict[str, str] = {}
    if isinstance(given, str):
        named["default"] = given
    elif isinstance(given, list):
        named.update((entry["name"], entry["template"]) for entry in given)
    files = {"default": folder / "chat_template.jinja"}
    files["tool_use"] = folder / "additional_chat_templates" / "tool_use.jinja"
    for name, file in files.items():
        if file.is_file():
            named[name] = file.read_text(encoding="utf-8")
    return named.get("default"), named.get("tool_use")


def _eos_ids(
    folder: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]
) -> tuple[int, ...]:
    """Those of the generation settings, else of the model, and the tokenizer's own."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids = _read(folder / name).get("eos_token_id")
        if ids is not None:
            found += ids if isinstance(ids, list) else [ids]
            break
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if own is not None:
        found.append(own)
    return tuple(dict.fromkeys(found))


# From a GGUF file.


def _from_gguf(file: GGUFFile) -> Tokenizer:
    tokens = file.get("tokenizer.ggml.tokens")
    kind = file.get("tokenizer.ggml.model")
    if tokens is None:
        raise TokenizerError(f"{file.path}: no tokenizer.ggml.tokens, expected a vocabulary")
    if kind == "gpt2":
        backend = _byte_level(file, tokens)
    elif kind == "llama":
        backend = _sentencepiece(file, tokens)
    else:
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}, expected gpt2 or llama"
        )
    _add_special(backend, tokens, file.get("tokenizer.ggml.token_type") or [])
    ids = {
        name: file.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in zip(_SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=False)
    }
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    if _adds_bos(file, kind) and "bos_token" in special:
        _prepend(backend, special["bos_token"], ids["bos_token"])
    ends = [file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return Tokenizer(
        backend=backend,
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        special_tokens=special,
        chat_template=file.get("tokenizer.chat_template"),
        tool_template=file.get("tokenizer.chat_template.tool_use"),
    )


def _adds_bos(file: GGUFFile, kind: str) -> bool:
    """What the file says, else llama.cpp's rule for this kind of vocabulary."""
    given = file.get("tokenizer.ggml.add_bos_token")
    if given is not None:
        return bool(given)
    return kind == "llama" or _SPLITS.get(file.get("tokenizer.ggml.pre")) == _LLAMA3_SPLIT


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """BPE over bytes; ``tokenizer.ggml.pre`` names how text is cut into words before."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = file.get("tokenizer.ggml.merges")
    if merges is None:
        raise TokenizerError(f"{file.path}: no tokenizer.ggml.merges, expected BPE merges")
    pre = file.get("tokenizer.ggml.pre") or "default"
    by_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words: pre_tokenizers.PreTokenizer
    if pre in _GPT2_WORDS:
        words = by_regex
    elif pre in _SPLITS_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.Sequence([digits, by_regex])
    elif pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words = pre_tokenizers.Sequence([split, to_bytes])
    else:
        known = ", ".join(sorted((*_GPT2_WORDS, *_SPLITS_DIGITS, *_SPLITS)))
        raise TokenizerError(f"{file.path}: tokenizer.ggml.pre is {pre!r}, expected one of {known}")
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in merges],
            # Llama 3 takes a word that is a token as it is, whatever the merges make of it.
            ignore_merges=_SPLITS.get(pre) == _LLAMA3_SPLIT,
        )
    )
    if pre == "qwen2":
        from tokenizers import normalizers

        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(file: GGUFFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE (Llama 2, Mistral): spaces become U+2581, unknown characters bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.get("tokenizer.ggml.scores")
    if scores is None:
        raise TokenizerError(f"{file.path}: no tokenizer.ggml.scores, expected one a token")
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_of(tokens, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = "\u2581"
    prefixed = file.get("tokenizer.ggml.add_space_prefix") is not False
    replace = normalizers.Replace(" ", space)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(space), replace]) if prefixed else replace
    )
    steps = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: any two tokens that make a third merge, best score first."""
    ids = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, pair) for pair in pairs]
    found.sort(key=lambda entry: -entry[0])
    return [pair for _, pair in found]


def _add_special(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]
) -> None:
    """Control tokens are special; those that a user defined are whole words, but plain text."""
    from tokenizers import AddedToken

    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, its_kind in zip(tokens, kinds, strict=False)
            if its_kind == kind
        ]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def _prepend(backend: tokenizers.Tokenizer, token: str, token_id: int) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, token_id)]
    )
