"""The blocks of README.md, to be carried out as they stand but for the names of a bucket."""

import re

from tests.support import ROOT

# Stand-ins: the user's program, and the library of his trainer (`tests/trainers` has the real one).
TRAIN = """
import argparse
from pathlib import Path
from loader import MDSWriter
parser = argparse.ArgumentParser()
parser.add_argument("--data")
parser.add_argument("--checkpoints", type=Path)
options = parser.parse_args()
with MDSWriter(options.data, {"number": "int"}) as writer:
    for number in range(1024):
        writer.write({"number": number})
"""
TRANSFORMERS = """
from pathlib import Path
class TrainingArguments:
    def __init__(self, output_dir, *, save_steps, save_total_limit):
        self.output_dir = output_dir
class Trainer:
    def __init__(self, model, args, *, train_dataset):
        self.folder = Path(args.output_dir) / "checkpoint-500"
    def train(self, *, resume_from_checkpoint):
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "trainer_state.json").write_text("{}")
"""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CACHE_SIZE = "500GiB"


def readme_blocks(language: str = "sh") -> list[str]:
    """Return the blocks of a language, in order. Without those for people who change the project."""
    page = (ROOT / "README.md").read_text().partition("\n## Develop")[0]
    return [code for found, code in _BLOCK.findall(page) if found == language]


def readme_block(language: str, word: str) -> str:
    """Return the only block that has a word."""
    (found,) = (code for code in readme_blocks(language) if word in code)
    return found


def with_bucket(code: str, *, endpoint_url: str, access_key: str, secret_key: str, source: str) -> str:
    """Return a block for a bucket of a test server, with a cache that a small disk holds, that ignores warnings."""
    code = re.sub(r"^(export AWS_\w+_URL=)\S+", rf"\1{endpoint_url}", code, flags=re.MULTILINE)
    code = code.replace("ACCESS_KEY_ID=KEY", f"ACCESS_KEY_ID={access_key}")
    code = code.replace("ACCESS_KEY=SECRET", f"ACCESS_KEY={secret_key}")
    code = code.replace("s3://my-bucket", source).replace(_CACHE_SIZE, "1GiB")
    # A warning is no failure: of a small disk, say.
    return re.sub(r"^(fusecache doctor [^#\n]*).*$", r"\1 || [ $? = 1 ]", code, flags=re.MULTILINE)
