"""`latest_checkpoint` on a local folder: the kinds it knows, which one is newest, and what it skips."""

import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from loader import LoaderError, latest_checkpoint
from loader.errors import ArgumentError


def put(folder: Path, *names: str, data: bytes = b"content", seconds: int = 1) -> None:
    """Make files with a time, in seconds since 1970."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (seconds, seconds))


def archive(path: Path, *, cut: int = 0) -> None:
    """Write a file as torch.save does, without its last bytes."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", b"content" * 100)
    os.truncate(path, path.stat().st_size - cut)


TRAINER = ("optimizer.pt", "model.safetensors", "trainer_state.json")


@pytest.mark.parametrize(
    ("files", "newest"),
    [
        ([f"checkpoint-{step}/{name}" for step in (90, 500, 1000) for name in TRAINER], "checkpoint-1000"),
        (["epoch=0-step=90.ckpt", "epoch=1-step=100.ckpt"], "epoch=1-step=100.ckpt"),
        (["step=4.ckpt", "step=10.ckpt"], "step=10.ckpt"),
        (["ep0-ba90-rank0.pt", "ep1-ba100-rank0.pt", "ep1-ba100-rank1.pt"], "ep1-ba100-rank0.pt"),
        (["ep0-ba8/.metadata", "ep0-ba8/__0_0.distcp"], "ep0-ba8"),
        (["step-0009/.metadata", "step-0010/.metadata", "step-0010/__0_0.distcp"], "step-0010"),
        (["checkpoint-7/.metadata", "checkpoint-7/__0_0.distcp"], "checkpoint-7"),
        (["step-9/model.pt", "step-10/model.pt"], "step-10"),
        (["step_9/a/model.pt", "step_10/a/model.pt"], "step_10"),
        (["step-9.pt", "step-10.pt"], "step-10.pt"),
        (["global_step9/x_model_states.pt", "global_step10/x_model_states.pt", "latest"], None),
        (["checkpoint_0/model.safetensors", "checkpoint_1/model.safetensors"], "checkpoint_1"),
        (["step=5.ckpt/.metadata", "step=5.ckpt/meta.pt"], "step=5.ckpt"),
        (["step-5/_SUCCESS", "step-5/model.pt"], "step-5"),
        (["step-5/model.pt", "step-5/.gitattributes"], "step-5"),
        (["step-5/model.pt", "step-5/.DS_Store"], "step-5"),
        (["step-5/model.pt", "step-5/chat.tmpl", "step-5/m.partition"], "step-5"),
        (["runs/step-5/model.pt", "step.txt", "model.pt", "checkpoints/x"], None),
    ],
)
def test_the_newest_of_each_kind(tmp_path: Path, files: list[str], newest: str | None) -> None:
    put(tmp_path, *files)
    assert latest_checkpoint(tmp_path) == (newest and tmp_path / newest)
    assert latest_checkpoint(str(tmp_path)) == (newest and tmp_path / newest)


@pytest.mark.parametrize(
    ("skipped", "make", "reason"),
    [
        ("checkpoint-9", lambda at: put(at, "model.safetensors", "rng_state.pth"), "no trainer_state.json"),
        ("checkpoint-9", lambda at: put(at, "trainer_state.json", data=b""), "trainer_state.json is empty"),
        ("step-9", lambda at: put(at, "__0_0.distcp", "__1_0.distcp"), "no .metadata"),
        ("step-9", lambda at: put(at, "optimizer/__0_0.distcp"), "no .metadata"),
        ("step-9", lambda at: put(at, ".metadata", data=b""), ".metadata is empty"),
        ("ep1-ba9", lambda at: put(at, "__0_0.distcp"), "no .metadata"),
        ("step=9.ckpt", lambda at: put(at, ".metadata", "__0_0.distcp"), "no meta.pt"),
        ("step-9", lambda at: at.mkdir(), "it is empty"),
        ("step-9", lambda at: (at / "model").mkdir(parents=True), "it is empty"),
        ("step-9", lambda at: put(at, "model.pt", "x/empty.pt", data=b""), "model.pt is empty"),
        ("step-9", lambda at: put(at, "model.pt.tmp"), "model.pt.tmp has a temporary name"),
        *(
            ("step-9", lambda at, name=name: put(at, name), f"{name} has a temporary name")
            for name in (
                "m.tmp7",
                "m.tmp-a1",
                "m.part",
                "m.partial.3",
                "m.incomplete_x",
                ".model.safetensors.Ab12Cd",
            )
        ),
        ("global_step9", lambda at: put(at, "mp_rank_00_model_states.pt"), "the file `latest` does not name"),
        ("step=9.ckpt", lambda at: at.touch(), "it is empty"),
        ("step=9.ckpt", lambda at: archive(at, cut=10), "its end is missing"),
        ("latest-rank0.pt", lambda at: at.symlink_to("ep0-ba9-rank0.pt"), "a link without its target"),
        (".step-9", lambda at: put(at, "model.pt"), "its name is temporary"),
        ("tmp-checkpoint-9", lambda at: put(at, "trainer_state.json"), "its name is temporary"),
        ("step-9.tmp", lambda at: put(at, "model.pt"), "its name is temporary"),
        ("step=9.ckpt.part", lambda at: at.write_bytes(b"content"), "its name is temporary"),
    ],
)
def test_an_incomplete_one_is_skipped_and_the_reason_logged(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    skipped: str,
    make: Callable[[Path], object],
    reason: str,
) -> None:
    caplog.set_level(logging.INFO, "loader")
    make(tmp_path / skipped)
    assert latest_checkpoint(tmp_path) is None
    assert f"skipped checkpoint={tmp_path / skipped} reason={reason}" in caplog.text
    assert f"no whole checkpoint directory={tmp_path}" in caplog.text
    put(tmp_path, "step-3/model.pt")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-3"


def test_deepspeed_counts_up_to_what_latest_names(tmp_path: Path) -> None:
    put(tmp_path, *(f"global_step{step}/mp_rank_00_model_states.pt" for step in (9, 10, 11)))
    put(tmp_path, "latest", data=b"global_step10")
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step10"
    put(tmp_path, "latest", data=b"global_step11")
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step11"


def test_a_damaged_latest_of_deepspeed_names_nothing(tmp_path: Path) -> None:
    put(tmp_path, "global_step9/mp_rank_00_model_states.pt")
    put(tmp_path, "latest", data=b"\xff\xfeglobal_step9")
    assert latest_checkpoint(tmp_path) is None


def test_an_empty_file_with_a_hidden_name_is_a_marker(tmp_path: Path) -> None:
    put(tmp_path, "step-9/model.pt")
    put(tmp_path, "step-9/.complete", data=b"")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-9"


def test_a_file_with_the_end_of_torch_save_is_whole(tmp_path: Path) -> None:
    archive(tmp_path / "last.ckpt")
    assert latest_checkpoint(tmp_path) == tmp_path / "last.ckpt"


def test_a_name_without_a_step_counts_if_it_is_later(tmp_path: Path) -> None:
    put(tmp_path, "epoch=0-step=10.ckpt", seconds=100)
    put(tmp_path, "last.ckpt", seconds=200)
    assert latest_checkpoint(tmp_path) == tmp_path / "last.ckpt"
    put(tmp_path, "last.ckpt", seconds=50)
    assert latest_checkpoint(tmp_path) == tmp_path / "epoch=0-step=10.ckpt"


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        (["last.ckpt/meta.pt", "last.ckpt/.metadata"], ["step-5/.metadata", "step-5/__0_0.distcp"]),
        (["checkpoint-5/trainer_state.json"], ["last.ckpt/meta.pt", "last.ckpt/.metadata"]),
        (["last.ckpt/a/model.pt"], ["best.ckpt/a/model.pt"]),
        (["step-5/a/model.pt"], ["step_5/a/model.pt"]),
        (["last.ckpt"], ["best.ckpt/model.pt"]),
    ],
)
def test_a_folder_is_as_old_as_its_marker_or_its_newest_file(
    tmp_path: Path, newer: list[str], older: list[str]
) -> None:
    for names, others in ((newer, older), (older, newer)):
        put(tmp_path, *names, seconds=200)
        put(tmp_path, *others, seconds=100)
        for name in (*names, *others):  # On a mount a folder's own time says nothing.
            place = (tmp_path / name).parent
            while place != tmp_path:
                os.utime(place, (50, 50) if name in names else (300, 300))
                place = place.parent
        assert latest_checkpoint(tmp_path) == tmp_path / names[0].partition("/")[0]


def test_what_is_written_behind_the_marker_does_not_count(tmp_path: Path) -> None:
    put(tmp_path, "step-5/.metadata", "last.ckpt/meta.pt", "last.ckpt/.metadata", seconds=100)
    put(tmp_path, "last.ckpt/meta.pt", seconds=200)
    put(tmp_path, "step-5/notes.txt", seconds=300)
    assert latest_checkpoint(tmp_path) == tmp_path / "last.ckpt"


def test_a_link_to_the_newest_gives_the_newest(tmp_path: Path) -> None:
    put(tmp_path, "ep0-ba8-rank0.pt")
    (tmp_path / "latest-rank0.pt").symlink_to("ep0-ba8-rank0.pt")
    assert latest_checkpoint(tmp_path) == tmp_path / "ep0-ba8-rank0.pt"


def test_a_directory_that_does_not_exist_has_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, "file")
    with pytest.raises(LoaderError, match=r"file cannot be read: Not a directory"):
        latest_checkpoint(tmp_path / "file")
    with pytest.raises(ArgumentError, match="Mount the bucket"):
        latest_checkpoint("s3://bucket/checkpoints")
