"""LLM Foundry: text to MDS on the mount, pretraining, another node, the Hugging Face export, finetuning, evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.recipes.runs import EXAMPLES, Run, run_to_the_end
from tests.recipes.shared_memory import no_shared_memory_left
from tests.recipes.stories import Reference, Story, files_below, hold, objects_below, upload
from tests.recipes.table import ROWS, Row, version
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket

RECIPE = EXAMPLES / "llm-foundry"
FOUNDRY = "llm-foundry/bin/llmfoundry"
LINK = "latest-rank0.pt"
# Each of the six shards has 11 samples and each step 4: steps 6 and 9 begin a shard.
PAUSE = "mds/shard.00002.mds"
DATA = "mds/shard.00003.mds"
DONE = ".text_to_mds_conversion_done"
EXPORT = "export/huggingface/ba12"
# Both read the same directory: with `remote:` empty, or as the only one of `streams:`.
STREAMS = ["train_loader.dataset.local=null", "train_loader.dataset.streams.text.local=${variables.root}/mds"]

__all__ = ["no_shared_memory_left"]


def convert(root: Path) -> list[str | Path]:
    """Return the command that converts the text below a directory to shards without compression."""
    tokens = ["--concat-tokens", "32", "--tokenizer", root / "tokenizer", "--use-tokenizer-eos"]
    folders = ["--input-folder", root / "text", "--output-folder", root / "mds"]
    how = ["--compression", "", "--processes", "6"]
    return [FOUNDRY, "data_prep", "convert_text_to_mds", *folders, *tokens, *how]


def foundry(command: str, name: str, root: Path, *overrides: str) -> list[str | Path]:
    """Return a command on one of the recipe's files."""
    return [FOUNDRY, command, RECIPE / name, f"variables.root={root}", *overrides]


def pretrain(root: Path, data: str) -> list[str | Path]:
    """Return the command that pretrains. data: local or streams."""
    code = f"variables.code={RECIPE}"
    return foundry("train", "pretrain.yaml", root, code, *(STREAMS if data == "streams" else []))


def finetune(root: Path) -> list[str | Path]:
    """Return the command that goes on from the exported model."""
    return foundry("train", "finetune.yaml", root, f"variables.code={RECIPE}")


def evaluate(root: Path, directory: Path) -> str:
    """Evaluate the finetuned model; return the last row of the table that LLM Foundry prints."""
    with Run(foundry("eval", "eval.yaml", root), directory) as run:
        run.finish()
        (row,) = [line for line in run.log().splitlines() if line.endswith("| tuned   |")]
        return row


@dataclass(frozen=True)
class Local:
    """What was done on a local disk. root: its files; tuning: step -> loss; row: of the evaluation."""

    root: Path
    pretraining: Reference
    tuning: dict[int, str]
    row: str


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    """All steps without a break on a local disk."""
    root, logs = tmp_path_factory.mktemp("llm-foundry"), tmp_path_factory.mktemp("logs")
    run_to_the_end(["llm-foundry/bin/python", RECIPE / "make_data.py", root], logs / "make-data")
    run_to_the_end(convert(root), logs / "convert")
    story = Story(lambda path: pretrain(path, "local"), logs, "checkpoints")
    pretraining = story.on_a_local_disk(root)
    tuning = run_to_the_end(finetune(root), logs / "finetune")
    return Local(root, pretraining, tuning, evaluate(root, logs / "evaluate"))


def by_source(root: Path) -> dict[str, bytes]:
    """Return text file -> the shard that was made of it. LLM Foundry takes files in the order of the directory."""
    _, *sources = (root / "mds" / DONE).read_text().splitlines()
    shards = sorted((root / "mds").glob("*.mds"))
    made = zip(sources, shards, strict=True)
    return {Path(source).name: shard.read_bytes() for source, shard in made}


def test_conversion_on_the_mount(local: Local, mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path):
    """Six processes write a folder each, and their shards are moved into one: as on a local disk."""
    for folder in ("text", "tokenizer"):
        upload(bucket, local.root, folder)
    node = mount()
    run_to_the_end(convert(node.path), tmp_path)
    node.sync()
    made = by_source(node.path)
    assert len(made) == 6
    assert made == by_source(local.root)
    objects = objects_below(bucket, "mds")
    assert objects == files_below(node.path / "mds")
    assert sorted(objects) == sorted(files_below(local.root / "mds"))


@pytest.mark.parametrize(
    ("data", "newest", "first"),
    [("local", "on its way", 5), ("streams", "published", 9)],
    ids=["local", "streams"],
)
def test_a_killed_run_goes_on_and_its_export_is_used(
    data: str,
    newest: str,
    first: int,
    local: Local,
    mount: Callable[..., Mount],
    bucket: Bucket,
    tmp_path: Path,
):
    """newest: of the checkpoint of step 8 when the node dies. first: step of the other node."""
    story = Story(lambda root: pretrain(root, data), tmp_path, "checkpoints")
    for folder in ("mds", "questions", "tokenizer"):
        upload(bucket, local.root, folder)
    held = [hold(bucket, "GetObject", DATA)]
    if newest == "on its way":
        held.append(hold(bucket, "PutObject", "checkpoints/ep0-ba8-rank0.pt"))
    saved = f"ep0-ba{first - 1}-rank0.pt"

    def published(name: str = saved) -> bool:
        # The old one goes last: when the link has moved, and not before.
        objects = objects_below(bucket, "checkpoints")
        return objects.get(LINK) == name and sorted(objects) == sorted([name, LINK])

    before = story.die(
        mount(),
        last=8,
        held=held,
        when=published,
        pause=hold(bucket, "GetObject", PAUSE),
        first=lambda: published("ep0-ba4-rank0.pt"),
    )
    losses = local.pretraining.losses
    assert before == {step: losses[step] for step in range(1, 9)}
    other = mount()
    if newest == "on its way":
        # It may arrive when its node is dead. No link leads to it, and Composer goes on only without it.
        (other.path / "checkpoints" / "ep0-ba8-rank0.pt").unlink(missing_ok=True)
        other.sync()
    assert published()
    resumed = story.resume(other)
    assert resumed.losses == {step: losses[step] for step in range(first, 13)}
    assert local.pretraining.names == ["ep0-ba12-rank0.pt", LINK]
    assert sorted(resumed.objects) == sorted([*local.pretraining.names, saved])
    assert resumed.objects[LINK] == "ep0-ba12-rank0.pt"
    exported = objects_below(bucket, EXPORT)
    assert exported == files_below(local.root / EXPORT)
    assert "model.safetensors" in exported
    compared = len(before) + len(resumed.losses)
    objects = {**resumed.objects, **exported}
    steps = ""
    if data == "local":
        tuning = run_to_the_end(finetune(other.path), tmp_path / "finetune")
        assert tuning == local.tuning
        assert evaluate(other.path, tmp_path / "evaluate") == local.row
        other.sync()
        tuned = objects_below(bucket, "tuned")
        assert tuned == files_below(other.path / "tuned")
        compared, objects, steps = compared + len(tuning), {**objects, **tuned}, ", finetuned, evaluated"
    ROWS.append(
        Row(
            f"LLM Foundry, {'`streams:`' if data == 'streams' else '`remote:` empty'}",
            version("llm-foundry", "llm-foundry"),
            1,
            f"in step 9, checkpoint of step 8 {newest}",
            f"from step {resumed.first}; exported{steps}",
            f"{compared} of {compared}",
            f"{len(objects)} of {len(objects)}",
        )
    )
