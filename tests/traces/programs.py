"""What is recorded: each function does to a directory what one trainer or tool does, with the real library.

`python -m tests.traces.programs NAME DIRECTORY` runs one. TMPDIR must lie on another file system than the directory, as
it does on a node with a mount. Models are tiny; no content is recorded.
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.traces.trace import MARK

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "examples" / "recipes"


def complete(root: Path, name: str, files: Iterable[Path], shows: Iterable[Path]) -> None:
    """Tell strace that a checkpoint is complete. shows: the files by which the library takes it for complete."""
    words = [name, *([path.relative_to(root).as_posix() for path in paths] for paths in (files, shows))]
    with_name = MARK + json.dumps(words, separators=(",", ":"))
    try:
        os.stat(with_name)
    except OSError:
        return  # of course: strace has seen it


def complete_folder(root: Path, folder: Path, *shows: str) -> None:
    """A folder is a checkpoint. shows: names in it; none: all its files show it."""
    files = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    complete(root, folder.relative_to(root).as_posix(), files, [folder / name for name in shows] or files)


# ---- PyTorch, by hand


def torch_rotation(root: Path) -> None:
    """Saves each checkpoint under its own name, then removes the one before the last two."""
    import torch

    for step in range(1, 6):
        path = root / f"step-{step}.pt"
        torch.save({"weights": torch.randn(20_000), "step": step}, path)
        complete(root, path.name, [path], [path])
        (root / f"step-{step - 2}.pt").unlink(missing_ok=True)


def torch_replace(root: Path) -> None:
    """Saves under a temporary name, syncs, and renames over the last checkpoint; as nanoGPT's users do."""
    import torch

    path = root / "ckpt.pt"
    for step in range(1, 5):
        with open(root / "ckpt.pt.tmp", "wb") as file:
            torch.save({"weights": torch.randn(20_000), "step": step}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(root / "ckpt.pt.tmp", path)
        complete(root, path.name, [path], [path])


def torch_in_place(root: Path) -> None:
    """Saves over the last checkpoint, and a text file that names the step after it."""
    import torch

    path, latest = root / "ckpt.pt", root / "latest.txt"
    for step in range(1, 5):
        torch.save({"weights": torch.randn(20_000), "step": step}, path)
        latest.write_text(f"{step}\n")
        complete(root, path.name, [path], [path])


def safetensors_over(root: Path) -> None:
    """Saves tensors over an existing file."""
    import torch
    from safetensors.torch import save_file

    path = root / "model.safetensors"
    for value in (1.0, 2.0, 3.0):
        save_file({"weights": torch.full((30_000,), value)}, path)
        complete(root, path.name, [path], [path])


# ---- trainers


def transformers_trainer(root: Path) -> None:
    """Trains eight steps, saves every second one, keeps one (`save_total_limit`)."""
    from tests.trainers import jobs_huggingface as jobs

    class Marking(jobs.Trainer):  # type: ignore[misc]
        def _rotate_checkpoints(self, *args: Any, **options: Any) -> None:
            newest = max(root.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
            complete_folder(root, newest, "trainer_state.json")
            super()._rotate_checkpoints(*args, **options)

    jobs.Trainer = Marking  # type: ignore[misc]
    jobs.train(output=str(root), steps=8, keep=1)


def accelerate_save_state(root: Path) -> None:
    """Saves the state four times and keeps two: accelerate removes the oldest before it saves."""
    from tests.trainers import jobs_huggingface as jobs

    loop = jobs._Loop(str(root), 2)
    for index in range(4):
        loop.steps(2 * index, 2 * index + 2)
        loop.accelerator.save_state()
        complete_folder(root, root / "checkpoints" / f"checkpoint_{index}")


def _lightning(root: Path, save_last: Any) -> None:
    from tests.trainers import jobs_lightning as jobs

    class Marking(jobs.ModelCheckpoint):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            if trainer.global_step % 2 == 0:
                path, last = root / f"step={trainer.global_step}.ckpt", root / "last.ckpt"
                complete(root, path.name, [path], [path])
                complete(root, last.name, [last, path] if last.is_symlink() else [last], [last])

    jobs.ModelCheckpoint = Marking  # type: ignore[misc]
    jobs.train(directory=str(root), steps=8, save_last=save_last, keep=2)


def lightning_last(root: Path) -> None:
    """Keeps the two newest (`save_top_k=2`) and a copy as `last.ckpt`."""
    _lightning(root, save_last=True)


def lightning_link(root: Path) -> None:
    """Keeps the two newest, and a symlink `last.ckpt` to the newest."""
    _lightning(root, save_last="link")


# ---- trainers of examples/recipes, each in its own virtual environment


def composer_trainer(root: Path) -> None:
    """Saves three times and keeps one; a symlink leads to the newest."""
    from composer.callbacks.checkpoint_saver import CheckpointSaver

    recipe, data = runpy.run_path(str(RECIPES / "composer" / "train.py")), Path(os.environ["TMPDIR"]) / "data"
    rotate = CheckpointSaver._rotate_checkpoints

    def marking(saver: Any, *args: Any, **options: Any) -> None:
        link = root / "latest-rank0.pt"
        newest = root / link.readlink()
        complete(root, newest.name, [newest], [newest])
        complete(root, link.name, [link, newest], [link])
        rotate(saver, *args, **options)

    CheckpointSaver._rotate_checkpoints = marking
    recipe["make_data"](data)
    recipe["train"](data, root, 12)


def deepspeed_zero(root: Path) -> None:
    """Two ranks write their parts of three checkpoints; the file `latest` names the newest."""
    recipe = runpy.run_path(str(RECIPES / "deepspeed" / "train.py"))
    recipe["make_data"](Path(os.environ["TMPDIR"]) / "data")
    _ranks(root, 2, "_deepspeed")


def _deepspeed_rank(root: Path) -> None:
    import torch.distributed as dist
    from deepspeed import DeepSpeedEngine

    recipe = runpy.run_path(str(RECIPES / "deepspeed" / "train.py"))
    save = DeepSpeedEngine.save_checkpoint

    def marking(engine: Any, *args: Any, **options: Any) -> None:
        save(engine, *args, **options)
        dist.barrier()
        if dist.get_rank() == 0:
            latest, folder = root / "latest", root / f"global_step{engine.global_steps}"
            complete(root, latest.name, [latest, *sorted(folder.iterdir())], [latest])

    DeepSpeedEngine.save_checkpoint = marking
    recipe["train"](Path(os.environ["TMPDIR"]) / "data", root, 12)


def litgpt_pretrain(root: Path) -> None:
    """Pretrains and saves three times; `resume: auto` takes the highest step that has a model."""
    import litgpt.pretrain
    from litgpt.__main__ import main as litgpt_main

    tokens = Path(os.environ["TMPDIR"]) / "tokens"
    recipe = RECIPES / "litgpt"
    subprocess.run([sys.executable, recipe / "tokens.py", tokens], check=True)
    save = litgpt.pretrain.save_checkpoint

    def marking(fabric: Any, state: Any, tokenizer: Any, file: Path) -> None:
        save(fabric, state, tokenizer, file)
        complete(root, file.parent.relative_to(root).as_posix(), [file], [file])

    litgpt.pretrain.save_checkpoint = marking
    sys.path.insert(0, str(recipe))
    words = ["--config", recipe / "pretrain.yaml", "--data.path", tokens, "--out_dir", root / "out"]
    sys.argv = ["litgpt", "pretrain", *map(str, words)]
    litgpt_main()


# ---- distributed checkpoints


def _distributed(root: Path, *, asynchronous: bool) -> None:
    """Saves four times, keeps one; the previous one goes when the next is complete."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(1, 5):
        state = {f"rank{rank}.{index}": torch.full((3000,), float(step)) for index in range(3)}
        folder = root / f"step-{step}"
        if asynchronous:
            dcp.async_save(state, checkpoint_id=folder).result()
        else:
            dcp.save(state, checkpoint_id=folder)
        dist.barrier()
        if rank == 0:
            complete_folder(root, folder, ".metadata")
            if step > 1:
                shutil.rmtree(root / f"step-{step - 1}")
        dist.barrier()
    dist.destroy_process_group()


def _ranks(root: Path, count: int, name: str) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    subprocess.run([sys.executable, *words, "-m", __spec__.name, name, root], check=True)


def dcp_one_rank(root: Path) -> None:
    """One rank saves with torch.distributed.checkpoint, and removes the checkpoint before."""
    _ranks(root, 1, "_save")


def dcp_two_ranks(root: Path) -> None:
    """Two ranks do, a file each."""
    _ranks(root, 2, "_save")


def dcp_async(root: Path) -> None:
    """Two ranks do with `async_save`."""
    _ranks(root, 2, "_async_save")


# ---- data sets


def mds_writer(root: Path) -> None:
    """Writes a data set of MDS shards; its index comes last."""
    from tests.support.real_streaming import mend_torchvision

    mend_torchvision()
    from streaming import MDSWriter

    columns = {"id": "int", "data": "bytes"}
    with MDSWriter(out=str(root / "mds"), columns=columns, size_limit=20_000, hashes=["sha1"]) as writer:
        for index in range(60):
            writer.write({"id": index, "data": bytes(2000)})
    complete_folder(root, root / "mds", "index.json")


def _sample(index: int) -> dict[str, Any]:
    return {"id": index, "data": bytes(2000)}


def litdata_optimize(root: Path) -> None:
    """Writes a data set of LitData chunks by two workers."""
    from litdata import optimize

    optimize(
        fn=_sample, inputs=list(range(60)), output_dir=str(root / "lit"), chunk_bytes=20_000, num_workers=2
    )
    complete_folder(root, root / "lit", "index.json")


def hub_cache(root: Path) -> None:
    """Downloads two revisions of a repository into a cache, from a hub on this machine."""
    files = {"config.json": b"{}", "model.safetensors": bytes(90_000), "tokenizer.json": bytes(5000)}

    class Hub(BaseHTTPRequestHandler):
        revision = "a" * 40

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if self.path.startswith("/api/models/"):
                data = json.dumps(
                    {"id": "o/m", "sha": self.revision, "siblings": [{"rfilename": name} for name in files]}
                ).encode()
            else:
                data = files[self.path.rpartition("/")[2]]
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", self.revision)
            self.send_header("ETag", f'"{len(data):040x}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_HUB_OFFLINE"] = "0"
    from huggingface_hub import snapshot_download

    for letter, size in (("a", 90_000), ("b", 95_000)):
        Hub.revision, files["model.safetensors"] = letter * 40, bytes(size)
        snapshot_download(
            "o/m", cache_dir=root, endpoint=f"http://127.0.0.1:{server.server_port}", max_workers=2
        )
    server.shutdown()


# ---- logs


def tensorboard_writer(root: Path) -> None:
    """Writes scalars for a while; the file of events stays open."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(root / "runs")) as writer:
        for step in range(60):
            writer.add_scalar("loss", 1 / (1 + step), step)
            if step % 10 == 9:
                writer.flush()


def wandb_offline(root: Path) -> None:
    """Logs a run of Weights & Biases without a network."""
    import wandb

    run = wandb.init(
        mode="offline", project="p", dir=str(root), settings=wandb.Settings(x_disable_stats=True)
    )
    for step in range(20):
        run.log({"loss": 1 / (1 + step)})
    run.finish()


# ---- tools


def _source(root: Path) -> Path:
    """Make a folder with files, a link and an empty folder, elsewhere."""
    source = Path(os.environ["TMPDIR"]) / "source"
    (source / "a" / "empty").mkdir(parents=True)
    for index in range(4):
        (source / "a" / f"{index}.bin").write_bytes(bytes([index]) * 30_000 * (index + 1))
    (source / "b.txt").write_text("b")
    (source / "link").symlink_to("a/1.bin")
    return source


def _change(source: Path) -> None:
    (source / "a" / "1.bin").write_bytes(b"new" * 30_000)
    (source / "a" / "2.bin").unlink()
    with open(source / "a" / "3.bin", "ab") as file:
        file.write(b"more" * 5000)


def _rsync(root: Path, *flags: str) -> None:
    source = _source(root)
    subprocess.run(["rsync", "-a", f"{source}/", f"{root}/copy/"], check=True)
    _change(source)
    subprocess.run(
        ["rsync", "-a", "--delete", "--ignore-times", *flags, f"{source}/", f"{root}/copy/"], check=True
    )


def rsync_archive(root: Path) -> None:
    """`rsync -a` of a folder, and again when a file was replaced, one removed and one appended to."""
    _rsync(root)


def rsync_in_place(root: Path) -> None:
    """The same, the second time with `--inplace`."""
    _rsync(root, "--inplace", "--no-whole-file")


def tar_extract(root: Path) -> None:
    """`tar x` of a folder."""
    source = _source(root)
    subprocess.run(["tar", "cf", source.parent / "a.tar", "-C", source, "."], check=True)
    subprocess.run(["tar", "xf", source.parent / "a.tar", "-C", root], check=True)


def git_clone_and_commit(root: Path) -> None:
    """`git clone` of a repository, a commit, and `git gc`."""
    source = _source(root)

    def git(folder: Path, *words: str) -> None:
        names = [f"{role}_{word}" for role in ("GIT_AUTHOR", "GIT_COMMITTER") for word in ("NAME", "EMAIL")]
        environment = {**os.environ, **dict.fromkeys(names, "name"), "GIT_CONFIG_GLOBAL": "/dev/null"}
        subprocess.run(["git", "-c", "gc.auto=0", *words], cwd=folder, env=environment, check=True)

    git(source, "init", "--quiet")
    git(source, "add", ".")
    git(source, "commit", "--quiet", "-m", "first")
    git(root, "clone", "--quiet", "--no-hardlinks", "--template=", str(source), "copy")
    (root / "copy" / "b.txt").write_text("changed")
    git(root / "copy", "commit", "--quiet", "-a", "-m", "second")


@dataclass(frozen=True)
class Program:
    """packages: whose versions matter. recipe: the virtual environment of `make test-recipes` that runs it."""

    run: Callable[[Path], None]
    packages: tuple[str, ...] = ()
    recipe: str = ""

    @property
    def python(self) -> Path:
        """The interpreter that has the packages."""
        return (
            ROOT / "build" / "recipes" / self.recipe / "bin" / "python"
            if self.recipe
            else Path(sys.executable)
        )


PROGRAMS = {
    "torch-rotation": Program(torch_rotation, ("torch",)),
    "torch-replace": Program(torch_replace, ("torch",)),
    "torch-in-place": Program(torch_in_place, ("torch",)),
    "safetensors-over": Program(safetensors_over, ("safetensors",)),
    "transformers": Program(transformers_trainer, ("transformers",)),
    "accelerate": Program(accelerate_save_state, ("accelerate",)),
    "lightning-last": Program(lightning_last, ("lightning",)),
    "lightning-link": Program(lightning_link, ("lightning",)),
    "composer": Program(composer_trainer, ("mosaicml",), "composer"),
    "deepspeed": Program(deepspeed_zero, ("deepspeed",), "deepspeed"),
    "litgpt": Program(litgpt_pretrain, ("litgpt",), "litgpt"),
    "dcp-one-rank": Program(dcp_one_rank, ("torch",)),
    "dcp-two-ranks": Program(dcp_two_ranks, ("torch",)),
    "dcp-async": Program(dcp_async, ("torch",)),
    "mds": Program(mds_writer, ("mosaicml-streaming",)),
    "litdata": Program(litdata_optimize, ("litdata",)),
    "hub-cache": Program(hub_cache, ("huggingface_hub",)),
    "tensorboard": Program(tensorboard_writer, ("tensorboard",)),
    "wandb": Program(wandb_offline, ("wandb",)),
    "rsync": Program(rsync_archive),
    "rsync-in-place": Program(rsync_in_place),
    "tar": Program(tar_extract),
    "git": Program(git_clone_and_commit),
}
INSIDE = {
    "_save": lambda root: _distributed(root, asynchronous=False),
    "_async_save": lambda root: _distributed(root, asynchronous=True),
    "_deepspeed": _deepspeed_rank,
}


if __name__ == "__main__":
    name, root = sys.argv[1], Path(sys.argv[2])
    (INSIDE[name] if name in INSIDE else PROGRAMS[name].run)(root)
