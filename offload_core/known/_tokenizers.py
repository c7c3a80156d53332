"""Small tokenizers made here, without a download: each byte or letter is a token, so no two prompts share their ids."""

from typing import Any

from transformers import ByT5Tokenizer, CLIPTokenizer, GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer, T5Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

CLIP_LENGTH = 77
SPACE = "\u0120"  # how byte-level tokenizers write a space
SENTENCE_SPACE = "\u2581"  # how sentencepiece does

# The two fixed texts Qwen-Image wraps around a prompt begin with 34 tokens of the real tokenizer, which the pipeline
# cuts off by number. The words below become one token each, so that the same cut removes the same text here.
QWEN_TEMPLATE_WORDS = [
    *"system user assistant Describe".split(),
    *(
        SPACE + word
        for word in (
            "the image by detailing color shape size texture quantity text spatial relationships of objects and "
            "background"
        ).split()
    ),
]

QWEN_SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
)

# HunyuanVideo cuts off 95 tokens; with one token a word the fixed text is about as long as with the real tokenizer.
HUNYUAN_TEMPLATE_WORDS = tuple(
    SENTENCE_SPACE + word
    for word in (
        "the video by detailing following aspects main content and theme of color shape size texture quantity text "
        "spatial relationships objects events behaviors temporal physical movement changes background environment "
        "light style atmosphere camera angles movements transitions used in"
    ).split()
)

LLAMA_SPECIAL_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LETTERS = (SENTENCE_SPACE, *(chr(code) for code in range(33, 127)))

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def clip_tokenizer(pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    """Return a byte-level CLIP tokenizer: 514 tokens, the two special ones last as in the real vocabulary."""
    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab=_numbered(tokens), merges=[], pad_token=pad_token, model_max_length=CLIP_LENGTH)


def t5_tokenizer(length: int = 512) -> T5Tokenizer:
    """Return a letter-level T5 (and umT5) tokenizer: pad 0, end 1, unknown 2, then the printable ASCII characters.

    length: of a text at most.
    """
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -2.0) for piece in LETTERS)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=length)


def qwen_tokenizer(**options: Any) -> Qwen2Tokenizer:
    """Return a byte-level Qwen tokenizer with the chat template and special tokens that the pipelines use.

    options: further ones of its class.
    """
    merges = _left_to_right_merges(QWEN_TEMPLATE_WORDS)
    tokens = [*bytes_to_unicode().values(), *("".join(pair) for pair in merges)]
    tokenizer = Qwen2Tokenizer(
        vocab=_numbered([*tokens, "<|endoftext|>"]), merges=merges, model_max_length=2048, **options
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_SPECIAL_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byt5_tokenizer() -> ByT5Tokenizer:
    """Return the byte tokenizer of ByT5, which needs no vocabulary file: 3 special tokens, then 256 bytes."""
    return ByT5Tokenizer(extra_ids=0, model_max_length=256)


def gemma_tokenizer() -> GemmaTokenizer:
    """Return a letter-level Gemma tokenizer with its bytes to fall back on."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    return GemmaTokenizer(vocab=_numbered([*special, *_bytes_to_fall_back_on(), *LETTERS]), model_max_length=2048)


def llama_tokenizer() -> LlamaTokenizer:
    """Return a Llama tokenizer of letters and of the words that HunyuanVideo wraps around a prompt."""
    merges = _left_to_right_merges(HUNYUAN_TEMPLATE_WORDS)
    tokens = ["<unk>", "<s>", "</s>", *_bytes_to_fall_back_on(), *LETTERS, *("".join(pair) for pair in merges)]
    tokenizer = LlamaTokenizer(vocab=_numbered(tokens), merges=merges, pad_token="</s>", model_max_length=2048)
    tokenizer.add_special_tokens({"additional_special_tokens": list(LLAMA_SPECIAL_TOKENS)})
    return tokenizer


def mistral_tokenizer() -> LlamaTokenizer:
    """Return a tokenizer of letters in the place of FLUX.2-dev's processor, whose messages are lists of parts."""
    tokenizer = llama_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
    )
    return tokenizer


def _bytes_to_fall_back_on() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def _left_to_right_merges(words: tuple[str, ...] | list[str]) -> list[tuple[str, str]]:
    """Return the merge rules that grow each word from its first letter: (t, h), (th, e) for "the"."""
    rules = ((word[:end], word[end]) for word in words for end in range(1, len(word)))
    return list(dict.fromkeys(rules))
