"""The case of one data set at two endpoints, which limit their speed: many files, read cold through one mount."""

from contextlib import ExitStack
from functools import partial

from benchmarks.bench import Bench, read
from benchmarks.origins import Origin
from benchmarks.peers import Fusecache, Mount, mounted
from benchmarks.processes import BenchmarkError, drop_pages

BUCKET = "endpoints"
READERS = 8
ONE = "one-endpoint"


def endpoints(bench: Bench, origin: Origin) -> None:
    """Read many files, each from start to end, by eight readers: from one endpoint, and from two."""
    for twin in (False, True):
        if bench.origins.add_bucket(origin, BUCKET, twin=twin):
            bench.origins.control(origin, twin=twin).add_many(
                "shard-{:05}", bench.sizes.endpoint_files, size=bench.sizes.endpoint_file_bytes, bucket=BUCKET
            )
    case = f"endpoints {origin.name}"
    for name in bench.turn(["fusecache", ONE]):
        try:
            with ExitStack() as stack:
                site = stack.enter_context(bench.origins.answering(origin, BUCKET))
                twin_site = stack.enter_context(bench.origins.answering(origin, BUCKET, twin=True))
                config = bench.directory / "endpoints.toml"
                config.write_text(f'[[endpoint]]\nurl = "{twin_site.endpoint_url}"\n')
                flags = () if name == ONE else ("--config", str(config))
                mount = stack.enter_context(mounted(Fusecache(name, flags), site, bench.directory))
                drop_pages()
                bench.record(case, name, partial(_read_all, bench, origin, mount))
        except BenchmarkError as exc:
            bench.record_failure(case, name, exc)


def _read_all(bench: Bench, origin: Origin, mount: Mount) -> dict[str, float]:
    """Return the rate, and the share of the bytes that the second endpoint sent."""
    files, size = bench.sizes.endpoint_files, bench.sizes.endpoint_file_bytes
    paths = [str(mount.path / f"shard-{index:05}") for index in range(files)]
    cpu = mount.cpu_seconds()
    mount.memory.take()
    answer = read("small_files", paths=paths, threads=READERS, seconds=120)
    if answer["bytes"] != files * size:
        raise BenchmarkError(f"wrong size: {answer['bytes']} of {files * size}")
    sent = [
        sum(entry.bytes_out for entry in bench.origins.control(origin, twin=twin).log("GetObject"))
        for twin in (False, True)
    ]
    return {
        "rate": answer["bytes"] / answer["seconds"],
        "seconds": answer["seconds"],
        "cpu_per_gib": (mount.cpu_seconds() - cpu) * 2**30 / answer["bytes"],
        "second_share": sent[1] / sum(sent),
        "memory_bytes": mount.memory.take(),
    }
