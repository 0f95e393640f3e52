"""LitGPT: `resume: auto` on another node, with the loader's state; the last checkpoint is that of a local disk."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.runs import EXAMPLES, run_to_the_end
from tests.recipes.stories import Reference, Story, files_below, hold, objects_below, upload
from tests.recipes.table import ROWS, Row, version
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket

RECIPE = EXAMPLES / "litgpt"
FOLDER = "out"
# Samples 36 to 39 are the tenth batch; checkpoints are made after the fourth and the eighth.
DATA = "tokens/train/00037.npy"
# Of the sixth batch.
PAUSE = "tokens/train/00021.npy"
MODEL = "lit_model.pth"
# Three digits after the point are all that LitGPT prints; the last checkpoint is compared as a whole.
LOSS = re.compile(r"\| iter (\d+) step \d+ \| loss train: ([\d.]+),")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local directory with the data set."""
    made = tmp_path_factory.mktemp("litgpt")
    run_to_the_end(["litgpt/bin/python", RECIPE / "tokens.py", made / "tokens"], made / "make-data")
    return made


def make_story(directory: Path) -> Story:
    def words(root: Path) -> list[str | Path]:
        folders = ["--data.path", root / "tokens", "--out_dir", root / FOLDER]
        return ["litgpt/bin/litgpt", "pretrain", "--config", RECIPE / "pretrain.yaml", *folders]

    return Story(words, directory, FOLDER, LOSS)


@pytest.fixture(scope="module")
def reference(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run without a break on a local disk."""
    return make_story(tmp_path_factory.mktemp("reference")).on_a_local_disk(root)


@pytest.mark.parametrize(
    ("newest", "first"), [("published", 9), ("on its way", 5)], ids=["published", "on its way"]
)
def test_a_killed_run_goes_on_from_the_highest_step_in_the_bucket(
    newest: str,
    first: int,
    root: Path,
    reference: Reference,
    mount: Callable[..., Mount],
    bucket: Bucket,
    tmp_path: Path,
):
    """newest: of the checkpoint of step 8 when the node dies. first: step of the other node."""
    story = make_story(tmp_path)
    upload(bucket, root, "tokens")
    held = [hold(bucket, "GetObject", DATA)]
    if newest == "on its way":
        held.append(hold(bucket, "PutObject", f"{FOLDER}/step-00000008/{MODEL}"))

    def newest_is(step: int = first - 1) -> bool:
        names, folder = objects_below(bucket, FOLDER).keys(), f"step-{step:08d}/"
        newest_folder = max((name.removesuffix(MODEL) for name in names if name.endswith(MODEL)), default="")
        # Its settings come behind the weights.
        return newest_folder == folder and names >= {
            name for name in reference.names if name.startswith(folder)
        }

    before = story.die(
        mount(),
        last=9,
        held=held,
        when=newest_is,
        pause=hold(bucket, "GetObject", PAUSE),
        first=lambda: newest_is(4),
    )
    assert before == {step: reference.losses[step] for step in range(1, 10)}
    other = mount()
    if newest == "on its way":
        # It may arrive when its node is dead, and LitGPT would go on from it.
        (other.path / FOLDER / "step-00000008" / MODEL).unlink(missing_ok=True)
        other.sync()
    assert newest_is()
    resumed = story.resume(other)
    assert resumed.losses == {step: reference.losses[step] for step in range(first, 13)}
    checkpoints = [name for name in reference.names if not name.startswith("logs/")]
    assert [name for name in sorted(resumed.objects) if not name.startswith("logs/")] == checkpoints
    assert resumed.objects[f"final/{MODEL}"] == files_below(root / FOLDER)[f"final/{MODEL}"]
    compared, objects = len(before) + len(resumed.losses), len(resumed.objects)
    ROWS.append(
        Row(
            "LitGPT",
            version("litgpt", "litgpt"),
            1,
            f"in step 10, checkpoint of step 8 {newest}",
            f"from step {resumed.first}",
            f"{compared} of {compared}",
            f"{objects} of {objects}",
        )
    )
