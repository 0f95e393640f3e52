"""DeepSpeed ZeRO stage 2: two ranks write their part of each checkpoint, `latest` is a file that names the newest."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.runs import EXAMPLES, run_to_the_end
from tests.recipes.stories import Reference, Story, hold, objects_below, upload
from tests.recipes.table import ROWS, Row, version
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket

TRAIN = EXAMPLES / "deepspeed" / "train.py"
FOLDER = "checkpoints"
# Samples 72 to 79 are the tenth batch; checkpoints are made after the fourth and the eighth.
DATA = "data/00075.npy"
# Of the sixth batch.
PAUSE = "data/00043.npy"
SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local directory with the data set."""
    made = tmp_path_factory.mktemp("deepspeed")
    run_to_the_end(
        ["deepspeed/bin/python", TRAIN, made / "data", "unused", "--make-data"], made / "make-data"
    )
    return made


def make_story(directory: Path) -> Story:
    def words(root: Path) -> list[str | Path]:
        launcher = ["deepspeed/bin/torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        return [*launcher, TRAIN, root / "data", root / FOLDER]

    return Story(words, directory, FOLDER)


@pytest.fixture(scope="module")
def reference(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run without a break on a local disk."""
    return make_story(tmp_path_factory.mktemp("reference")).on_a_local_disk(root)


@pytest.mark.parametrize(
    ("newest", "first"), [("published", 9), ("on its way", 5)], ids=["published", "on its way"]
)
def test_a_killed_run_goes_on_from_the_checkpoint_that_latest_names(
    newest: str,
    first: int,
    root: Path,
    reference: Reference,
    mount: Callable[..., Mount],
    bucket: Bucket,
    tmp_path: Path,
):
    """newest: of the second rank's part of step 8 when the node dies. first: step of the other node."""
    story = make_story(tmp_path)
    upload(bucket, root, "data")
    held = [hold(bucket, "GetObject", DATA)]
    if newest == "on its way":
        held.append(hold(bucket, "PutObject", f"{FOLDER}/global_step8/{SHARD}"))

    def named(step: int = first - 1) -> bool:
        return objects_below(bucket, FOLDER).get("latest") == f"global_step{step}".encode()

    before = story.die(
        mount(),
        last=9,
        held=held,
        when=named,
        pause=hold(bucket, "GetObject", PAUSE),
        first=lambda: named(4),
    )
    assert before == {step: reference.losses[step] for step in range(1, 10)}
    assert named()
    resumed = story.resume(mount())
    assert resumed.losses == {step: reference.losses[step] for step in range(first, 13)}
    assert sorted(resumed.objects) == reference.names
    assert f"global_step12/{SHARD}" in reference.names
    compared = len(before) + len(resumed.losses)
    objects = len(resumed.objects)
    killed = f"in step 10, a part of step 8 {newest}"
    ROWS.append(
        Row(
            "DeepSpeed ZeRO-2",
            version("deepspeed", "deepspeed"),
            2,
            killed,
            f"from step {resumed.first}",
            f"{compared} of {compared}",
            f"{objects} of {objects}",
        )
    )
