"""The tokenizer that a GGUF file's metadata describes, as a transformers fast tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# Kinds of token, as llama.cpp numbers them.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before byte-pair merging, by llama.cpp's name for it: a pattern, or None for GPT-2's own. The
# wrong cut gives wrong ids without an error, so a name that is not listed is refused.
_SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_SINGLE_DIGITS = {"smollm"}
_NFC = {"qwen2", "deepseek-r1-qwen"}
# Vocabularies whose tokens were not all made by merges: a piece that is a token is taken whole.
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}


def build_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """The fast tokenizer of `file`, with its special tokens and chat template.

    Raises:
        ModelLoadError: no tokenizer in the file, or a kind that is not supported.
    """
    try:
        return _build(file)
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises bare Exception; forged metadata can surface as nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"{file.path}: its tokenizer is damaged: {reason[:200]}") from error


def _build(file: GGUFFile) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    metadata = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    tokens, kind = metadata.get("tokens"), metadata.get("model")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelLoadError(f"{file.path} holds no tokenizer (metadata tokenizer.ggml.tokens)")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(file, metadata), metadata.get("pre") in _BOS_BY_DEFAULT
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata), True
    else:
        raise ModelLoadError(f"{file.path}: tokenizer model {kind!r} is not supported; supported are gpt2, llama")
    _add_special_tokens(tokenizer, tokens, metadata.get("token_type") or [])
    special = _special_tokens(file, metadata, tokens)
    if metadata.get("add_bos_token", add_bos) and "bos_token" in special:
        _prepend_bos(tokenizer, special["bos_token"])
    template = file.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _byte_level(file: GGUFFile, metadata: dict[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("pre", "gpt-2")
    if pre not in _SPLITS:
        raise ModelLoadError(
            f"{file.path}: pre-tokenizer {pre!r} is not supported; supported are {', '.join(_SPLITS)}. "
            "Use the Hugging Face folder of this model"
        )
    vocab = {token: index for index, token in enumerate(metadata["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _IGNORE_MERGES))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if pre in _SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    pattern = _SPLITS[pre]
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-pair SentencePiece as Llama 1 and 2 and Mistral 7B have it: spaces are "▁", unknown characters bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata["tokens"]
    unknown = metadata.get("unknown_token_id", 0)
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, metadata.get("scores") or [-float(i) for i in range(len(tokens))])
    unk_token = tokens[unknown] if 0 <= unknown < len(tokens) else None
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = metadata.get("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", left=1, right=0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose joined piece scores best; every way to cut a piece in two is a merge."""
    merges = [
        (-scores[index], vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, index in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    from tokenizers import AddedToken

    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _special_tokens(file: GGUFFile, metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    special: dict[str, str] = {}
    for key, role in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = metadata.get(f"{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise ModelLoadError(f"{file.path}: {key}_token_id is {index}, but the tokenizer has {len(tokens)} tokens")
        special[f"{role}_token"] = tokens[index]
    return special


def _prepend_bos(tokenizer: Tokenizer, bos: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
