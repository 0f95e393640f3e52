"""MosaicML Composer: one and two ranks, `latest-rank0.pt`, old checkpoints removed, autoresume on another node."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.runs import EXAMPLES, run_to_the_end
from tests.recipes.stories import Reference, Story, hold, objects_below, upload
from tests.recipes.table import ROWS, Row, version
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket

TRAIN = EXAMPLES / "composer" / "train.py"
LINK = "latest-rank0.pt"
# Samples 72 to 79 are the tenth batch, whatever the ranks; checkpoints are made after the fourth and the eighth.
DATA = "data/00075.npy"
# Of the sixth batch.
PAUSE = "data/00043.npy"


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    """How many ranks the launcher starts."""
    return int(request.param)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local directory with the data set."""
    made = tmp_path_factory.mktemp("composer")
    run_to_the_end(["composer/bin/python", TRAIN, made / "data", "unused", "--make-data"], made / "make-data")
    return made


def make_story(ranks: int, directory: Path) -> Story:
    def words(root: Path) -> list[str | Path]:
        return [
            "composer/bin/composer",
            "-n",
            str(ranks),
            TRAIN,
            root / "data",
            root / f"checkpoints-{ranks}",
        ]

    return Story(words, directory, f"checkpoints-{ranks}")


@pytest.fixture(scope="module")
def reference(ranks: int, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run without a break on a local disk."""
    return make_story(ranks, tmp_path_factory.mktemp("reference")).on_a_local_disk(root)


@pytest.mark.parametrize(
    ("newest", "first"), [("published", 9), ("on its way", 5)], ids=["published", "on its way"]
)
def test_a_killed_run_goes_on_from_the_latest_whole_checkpoint(
    newest: str,
    first: int,
    ranks: int,
    root: Path,
    reference: Reference,
    mount: Callable[..., Mount],
    bucket: Bucket,
    tmp_path: Path,
):
    """newest: of the checkpoint of step 8 when the node dies. first: step of the other node."""
    folder = f"checkpoints-{ranks}"
    story = make_story(ranks, tmp_path)
    upload(bucket, root, "data")
    held = [hold(bucket, "GetObject", DATA)]
    if newest == "on its way":
        held.append(hold(bucket, "PutObject", f"{folder}/ba8-rank0.pt"))
    saved = f"ba{first - 1}-rank0.pt"

    def published(name: str = saved) -> bool:
        # The old one goes last: when the link has moved, and not before.
        objects = objects_below(bucket, folder)
        return objects.get(LINK) == name and sorted(objects) == sorted([name, LINK])

    before = story.die(
        mount(),
        last=9,
        held=held,
        when=published,
        pause=hold(bucket, "GetObject", PAUSE),
        first=lambda: published("ba4-rank0.pt"),
    )
    assert before == {step: reference.losses[step] for step in range(1, 10)}
    other = mount()
    if newest == "on its way":
        # It may arrive when its node is dead. No link leads to it, and Composer goes on only without it.
        (other.path / folder / "ba8-rank0.pt").unlink(missing_ok=True)
        other.sync()
    assert published()
    resumed = story.resume(other)
    assert resumed.losses == {step: reference.losses[step] for step in range(first, 13)}
    # Composer forgets, when it goes on, the checkpoint that it goes on from, and never removes it.
    assert reference.names == ["ba12-rank0.pt", LINK]
    assert sorted(resumed.objects) == sorted([*reference.names, saved])
    assert resumed.objects[LINK] == "ba12-rank0.pt"
    ROWS.append(
        Row(
            "Composer",
            version("composer", "mosaicml"),
            ranks,
            f"in step 10, checkpoint of step 8 {newest}",
            f"from step {resumed.first}",
            f"{len(before) + len(resumed.losses)} of {len(before) + len(resumed.losses)}",
            f"{len(resumed.objects)} of {len(resumed.objects)}",
        )
    )
