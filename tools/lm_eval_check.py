"""Check a served model against lm-eval's own Hugging Face backend: the same log-likelihoods on the same weights.

Small tasks are made on the spot, from nothing but this repository: multiple choice, a text to continue, and the
perplexity of pages, one of them longer than the model's window. They go through lm-eval twice, over HTTP
(`local-completions`: token ids and texts, batched, several at once), served in float32, and through transformers, in
float64: what float32 rounds there adds up to more than the tolerance over the tokens of a page.

    pip install lm-eval[hf,api]                                     (beside jaxpaged, or in an environment of its own)
    python tools/lm_eval_check.py --tiny                            (a random Llama of two layers)
    python tools/lm_eval_check.py FOLDER --jaxpaged .venv/bin/jaxpaged

FOLDER is a Hugging Face folder with config.json, safetensors and tokenizer. Exits with 1 where a log-likelihood differs
by more than the tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 900.0
CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Kenya": "Nairobi",
    "Österreich": "Wien",
    "日本": "東京",
}


@dataclass(frozen=True)
class Task:
    """A task of lm-eval: its documents and what its YAML says beside where they are."""

    name: str
    fields: dict[str, Any]
    docs: list[dict[str, Any]]


def make_tasks(window: int) -> list[Task]:
    """
    Args:
        window: most tokens of a prompt; one page is made of at least twice as many.
    """
    names = list(CAPITALS.values())
    questions = [
        {
            "question": f"Q: What is the capital of {land}?\nA:",
            "choices": [names[(i + k) % len(names)] for k in range(4)],
        }
        for i, land in enumerate(CAPITALS)
    ]
    clozes = [{"text": f"The capital of {land} is", "end": f" {name}."} for land, name in CAPITALS.items()]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [{"page": part[:600]} for part in readme.split("\n## ")[:6]]
    # A tokenizer that knows words has about one token for 4 characters.
    pages.append({"page": (readme * (1 + 12 * window // len(readme)))[: 12 * window]})
    return [
        Task(
            "check_choice",
            {
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": 0,
                "metric_list": [{"metric": "acc"}],
            },
            questions,
        ),
        Task(
            "check_cloze",
            {
                "output_type": "loglikelihood",
                "doc_to_text": "{{text}}",
                "doc_to_target": "{{end}}",
                "target_delimiter": "",
                "metric_list": [{"metric": "perplexity"}],
            },
            clozes,
        ),
        Task(
            "check_pages",
            {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{page}}",
                "metric_list": [{"metric": "word_perplexity"}],
            },
            pages,
        ),
    ]


def write_tasks(tasks: list[Task], folder: Path) -> None:
    """One JSON-lines file and one YAML file (JSON is YAML) for each."""
    for task in tasks:
        data = folder / f"{task.name}.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in task.docs), encoding="utf-8")
        fields = {
            "task": task.name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **task.fields,
        }
        (folder / f"{task.name}.yaml").write_text(json.dumps(fields), encoding="utf-8")


def write_tiny_model(folder: Path) -> None:
    """A random Llama whose tokens are bytes, as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # so that the probabilities of tokens are far apart
                parameter.normal_(std=2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)


@contextlib.contextmanager
def serving(jaxpaged: str, model: Path, max_model_len: int) -> Iterator[str]:
    """A server of `model`; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        jaxpaged,
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "check",
    ]
    command += ["--dtype", "float32", "--max-model-len", str(max_model_len), "--no-warmup"]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "128"]  # few programs, and prompts in parts
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(f"{address}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def evaluate(kind: str, folder: Path, tasks: list[Task], **model_args: Any) -> dict[str, list[tuple[float, Any]]]:
    """Log-likelihoods of each task's requests, in their order, and whether each text was the greedy one."""
    import lm_eval  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    names = [task.name for task in tasks]
    results = lm_eval.simple_evaluate(
        model=kind, model_args=model_args, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    found: dict[str, list[tuple[float, Any]]] = {}
    for name in names:
        samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
        answers = [answer for sample in samples for [answer] in sample["resps"]]
        found[name] = [(a[0], a[1]) if isinstance(a, (list, tuple)) else (a, None) for a in answers]
    return found


def compare(expected: dict[str, list[tuple[float, Any]]], got: dict[str, list[tuple[float, Any]]], title: str) -> float:
    """Prints a line a task; returns the largest difference."""
    worst = 0.0
    for name, pairs in expected.items():
        assert len(pairs) == len(got[name]), f"{name}: {len(got[name])} answers for {len(pairs)} requests"
        most = max(abs(a[0] - b[0]) for a, b in zip(pairs, got[name], strict=True))
        greedy = sum(a[1] != b[1] for a, b in zip(pairs, got[name], strict=True))
        print(f"{title:24} {name:14} {len(pairs):4} requests   largest difference {most:.2e}   greedy differs {greedy}")
        worst = max(worst, most, 1.0 if greedy else 0.0)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="FOLDER", help="a Hugging Face folder")
    parser.add_argument("--tiny", action="store_true", help="make and check a tiny random model instead")
    parser.add_argument("--jaxpaged", default="jaxpaged", metavar="PATH", help="the program that serves")
    parser.add_argument("--window", type=int, default=256, metavar="N", help="most tokens of a prompt (default: 256)")
    parser.add_argument("--hf-dtype", default="float64", metavar="NAME", help="of transformers (default: float64)")
    parser.add_argument("--tolerance", type=float, default=1e-3, metavar="X", help="default: 1e-3")
    args = parser.parse_args()
    if args.tiny == (args.model is not None):
        parser.error("give a FOLDER, or --tiny")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = args.model or folder / "tiny"
        if args.tiny:
            write_tiny_model(model)
        tasks = make_tasks(args.window)
        write_tasks(tasks, folder)
        hf = {"pretrained": str(model), "dtype": args.hf_dtype, "device": "cpu", "batch_size": 4}
        # Over HTTP a window has one token less than `max_length` says, as one is drawn; of pages it has one less again.
        expected = evaluate("hf", folder, tasks[:2], **hf, max_length=args.window)
        expected |= evaluate("hf", folder, tasks[2:], **hf, max_length=args.window - 1)
        worst = 0.0
        with serving(args.jaxpaged, model, args.window + 1) as address:
            http = {
                "model": "check",
                "base_url": f"{address}/v1/completions",
                "tokenizer": str(model),
                "tokenizer_backend": "huggingface",
                "max_length": args.window + 1,
                "num_concurrent": 4,
            }
            for tokenized, size in ((True, 1), (True, 8), (False, 1)):
                # A prompt that is sent as text is made into tokens again, which may be others where a page was cut.
                some = tasks if tokenized else tasks[:2]
                title = f"{'token ids' if tokenized else 'texts'}, {size} a request"
                got = evaluate("local-completions", folder, some, **http, tokenized_requests=tokenized, batch_size=size)
                worst = max(worst, compare({name: expected[name] for name in got}, got, title))
    print(
        f"largest difference {worst:.2e}, tolerance {args.tolerance:g}: {'ok' if worst <= args.tolerance else 'FAILED'}"
    )
    return int(worst > args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
