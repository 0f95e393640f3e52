"""A small text set, questions to finetune and to evaluate with, and a tokenizer made of the text; no network needed."""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
FILES = 6
SYLLABLES = ("ba", "ke", "lo", "mi", "nu", "ra", "se", "to")


def write_lines(path: Path, lines: list[str]) -> None:
    """Write a file in a folder that may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))


def main(root: Path) -> None:
    """Write everything below a directory."""
    rng = random.Random(7)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(120)]
    for number in range(FILES):
        lines = [" ".join(rng.choices(words, k=8)) for _ in range(40)]
        write_lines(root / "text" / f"{number}.txt", lines)
    pairs = [(" ".join(rng.choices(words, k=4)), rng.choice(words)) for _ in range(32)]
    tuning = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in pairs]
    write_lines(root / "questions" / "train.jsonl", tuning)
    asked = [json.dumps({"context": prompt, "continuation": response}) for prompt, response in pairs]
    write_lines(root / "questions" / "asked.jsonl", asked)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(path) for path in sorted((root / "text").glob("*.txt"))], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)
    made.save_pretrained(root / "tokenizer")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
