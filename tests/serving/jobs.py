"""Makes models, and loads them as a server does: `python -m tests.serving.jobs {make,load} LIBRARY FOLDER MIB`.

Runs in the libraries' own environment. Prints one JSON object. A load's seconds end when each byte of each tensor was
read: libraries that map files only begin with that.
"""

import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
SHARDS = 4


def digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """Return a digest of tensors by name, whatever their order."""
    found = []
    for name, tensor in tensors:
        whole = torch.as_tensor(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
        found.append(name + hashlib.blake2b(whole.numpy().data).hexdigest())
    return hashlib.blake2b("".join(sorted(found)).encode()).hexdigest()


def made_tensors(mib: int, count: int = 16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    rows = mib * MIB // 4 // count // 256
    return {f"layers.{number}.weight": torch.randn(rows, 256) for number in range(count)}


class Safetensors:
    package = "safetensors"

    def make(self, folder: Path, mib: int) -> None:
        from safetensors.torch import save_file

        places = {}
        for shard in range(SHARDS):
            name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
            tensors = {f"{shard}.{key}": value for key, value in made_tensors(mib // SHARDS).items()}
            save_file(tensors, folder / name)
            places |= dict.fromkeys(tensors, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    def load(self, folder: Path) -> str:
        from safetensors.torch import load_file

        return digest(
            item for path in sorted(folder.glob("*.safetensors")) for item in load_file(path).items()
        )


class Transformers:
    package = "transformers"

    def make(self, folder: Path, mib: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        # 12 h² weights a layer, and 2 h a word.
        hidden = 512 if mib < 1000 else 2048
        layers = max(1, mib * MIB // 4 // (12 * hidden**2))
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            vocab_size=1000,
        )
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder, max_shard_size=f"{max(1, mib // SHARDS)}MB")

    def load(self, folder: Path) -> str:
        from transformers import AutoModelForCausalLM

        return digest(AutoModelForCausalLM.from_pretrained(folder).state_dict().items())


class Diffusers:
    package = "diffusers"

    def make(self, folder: Path, mib: int) -> None:
        from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

        torch.manual_seed(0)
        width = 32 * max(1, round((mib / 16) ** 0.5))
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        unet = UNet2DModel(sample_size=16, block_out_channels=(width, 2 * width), **blocks)
        DDPMPipeline(unet=unet, scheduler=DDPMScheduler()).save_pretrained(folder)

    def load(self, folder: Path) -> str:
        from diffusers import DDPMPipeline

        return digest(DDPMPipeline.from_pretrained(folder).unet.state_dict().items())


class Gguf:
    package = "gguf"

    def make(self, folder: Path, mib: int) -> None:
        from gguf import GGUFWriter

        writer = GGUFWriter(folder / "model.gguf", "llama")
        for name, tensor in made_tensors(mib).items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def load(self, folder: Path) -> str:
        from gguf import GGUFReader

        return digest((each.name, each.data.copy()) for each in GGUFReader(folder / "model.gguf").tensors)


class RunaiStreamer(Safetensors):
    package = "runai-model-streamer"

    def load(self, folder: Path) -> str:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in sorted(folder.glob("*.safetensors"))])
            return digest((name, tensor.clone()) for name, tensor in streamer.get_tensors())


class TorchLoad:
    package = "torch"

    def make(self, folder: Path, mib: int) -> None:
        torch.save(made_tensors(mib), folder / "pytorch_model.bin")

    def load(self, folder: Path) -> str:
        return digest(torch.load(folder / "pytorch_model.bin", mmap=True, weights_only=True).items())


class Dcp:
    """torch.distributed.checkpoint: saved by two ranks, loaded by four."""

    package = "torch"

    def make(self, folder: Path, mib: int) -> None:
        self._run(2, "save", folder, mib)

    def load(self, folder: Path) -> str:
        return self._run(4, "load", folder, int(os.environ["SERVING_MIB"]))

    def _run(self, ranks: int, what: str, folder: Path, mib: int) -> str:
        import subprocess

        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words += ["-m", "tests.serving.dcp_ranks", what, str(folder), str(mib)]
        done = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.split()[-1] if what == "load" else ""


LIBRARIES: dict[str, Any] = {
    "safetensors.torch.load_file": Safetensors(),
    "transformers from_pretrained": Transformers(),
    "diffusers from_pretrained": Diffusers(),
    "gguf GGUFReader": Gguf(),
    "Run:ai Model Streamer": RunaiStreamer(),
    "torch.load(mmap=True)": TorchLoad(),
    "torch.distributed.checkpoint, 4 ranks": Dcp(),
}


def main() -> None:
    what, name, folder, mib = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    os.environ["SERVING_MIB"] = str(mib)
    library = LIBRARIES[name]
    began = time.monotonic()
    found = library.make(folder, mib) if what == "make" else library.load(folder)
    seconds = time.monotonic() - began
    version = importlib.metadata.version(library.package)
    print(json.dumps({"version": version, "seconds": seconds, "digest": found}))  # noqa: T201


if __name__ == "__main__":
    main()
