"""What the .deb promises, tried on a booted machine as root; prints a PASS or FAIL line for each promise.

Run by checks.service with the system's Python, after apt installed /srv/package.deb. /srv/upgrade.deb is its next
version. The checks go in order: each begins where the one before left the system.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.s3server import ServerProcess
from tests.systemd.checks import (
    CACHE,
    CONFIG,
    FIRST,
    KEYS,
    MOUNT,
    UNIT,
    Check,
    a_written_file_is_read_back_and_reaches_the_bucket,
    active_means_the_mount_answers,
    daemon,
    expect,
    in_bucket,
    passes,
    shown,
    systemctl,
    wait_until,
    write_keys,
)

PACKAGE = Path("/srv/package.deb")
UPGRADE = Path("/srv/upgrade.deb")
OPT = Path("/opt/fusecache")
UNIT_FILE = Path("/usr/lib/systemd/system/fusecache@.service")
EXAMPLE = Path("/etc/fusecache/example.toml.sample")
HELPER = Path("/usr/sbin/mount.fusecache")


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it said."""
    return subprocess.run(words, capture_output=True, text=True, check=False)


def dpkg(*words: str | Path) -> None:
    """Run dpkg. Raises CheckError with its complaint."""
    ended = run(
        "dpkg", "--force-unsafe-io", *words
    )  # on a busy disk a sync of 4000 files takes half a minute
    expect(ended.returncode == 0, f"dpkg {words}: {ended.stderr.strip()}")


def expect_refused(ended: subprocess.CompletedProcess[str], reason: str) -> None:
    """Raise CheckError unless the program failed and named the reason in one line."""
    expect(ended.returncode != 0, "it was not refused")
    lines = [line for line in ended.stderr.splitlines() if reason in line]
    expect(len(lines) == 1, f"refused without the line {reason!r}: {ended.stderr}")


def is_installed() -> bool:
    """Whether dpkg has the package as installed, whole."""
    return run("dpkg-query", "--show", "--showformat=${db:Status-Status}", "fusecache").stdout == "installed"


def files_of(folder: Path) -> set[str]:
    """The names of all files below a folder."""
    return {str(Path(where, name)) for where, _, names in os.walk(folder) for name in names}


def daemon_folder() -> Path:
    """The folder whose Python runs the service."""
    return program_of(int(shown("MainPID"))).parents[1]


def program_of(pid: int) -> Path:
    """The Python that a process runs."""
    return Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0])


# ---- the checks, in order


def installing_again_changes_nothing(_: ServerProcess) -> None:
    before = files_of(OPT)
    dpkg("--install", PACKAGE)
    expect(files_of(OPT) == before, f"other files: {sorted(files_of(OPT) ^ before)[:9]}")
    verified = run("dpkg", "--verify", "fusecache").stdout
    expect(not verified, f"files are not as packed: {verified}")


def the_commands_work_from_anywhere(_: ServerProcess) -> None:
    for words in (["fusecache", "--version"], ["mount.fusecache", "-f", "s3://bucket", "/mnt"]):
        ended = run(*words)
        expect(ended.returncode == 0, f"{words}: {ended.stderr}")
    expect("compiler" not in run("sh", "-c", "command -v gcc && echo compiler").stdout, "there is a compiler")


def manual_and_completions_are_there(_: ServerProcess) -> None:
    for shell, name in (
        ("bash-completion/completions", "fusecache"),
        ("zsh/vendor-completions", "_fusecache"),
    ):
        text = Path("/usr/share", shell, name).read_text()
        expect("doctor" in text, f"{name}: no completion of doctor")
    checked = run("bash", "-n", "/usr/share/bash-completion/completions/fusecache")
    expect(checked.returncode == 0, checked.stderr)
    manual = run("gzip", "-dc", "/usr/share/man/man1/fusecache.1.gz").stdout
    expect(manual.startswith(".TH FUSECACHE"), manual[:80])


def the_unit_has_no_complaints(_: ServerProcess) -> None:
    ended = run("systemd-analyze", "verify", UNIT_FILE)
    expect(ended.returncode == 0 and not ended.stderr.strip(), ended.stderr.strip())


def make_refuses_beside_the_package(_: ServerProcess) -> None:
    for target in ("install", "uninstall"):
        expect_refused(run("make", "--no-print-directory", target), "apt-get remove fusecache")
    verified = run("dpkg", "--verify", "fusecache").stdout
    expect(not verified, f"files are not as packed: {verified}")


def an_upgrade_leaves_a_running_daemon_alone(server: ServerProcess) -> None:
    pid, folder = shown("MainPID"), daemon_folder()
    before = files_of(folder)
    dpkg("--install", UPGRADE)
    expect(shown("MainPID") == pid, "another daemon runs")
    expect(files_of(folder) == before, f"the daemon lost files: {sorted(files_of(folder) ^ before)[:9]}")
    expect((MOUNT / "first").read_bytes() == FIRST, "the file is not what it was")
    (MOUNT / "meanwhile").write_bytes(FIRST)
    wait_until("the file is in the bucket", lambda: in_bucket(server, "meanwhile", FIRST))
    status = run("fusecache", "status", MOUNT)
    expect(status.returncode == 0 and status.stdout.startswith("OK"), status.stdout[:200] + status.stderr)


def a_restart_runs_the_upgrade(_: ServerProcess) -> None:
    old = daemon_folder()
    systemctl("restart", UNIT)
    expect(daemon_folder() != old, f"still runs from {old}")
    expect((MOUNT / "first").read_bytes() == FIRST, "the file is not what it was")
    dpkg("--install", UPGRADE)
    expect(not old.exists(), f"nothing runs from {old}, and it is still there")


def another_version_takes_over_under_an_open_file(server: ServerProcess) -> None:
    for number, version in enumerate((PACKAGE, UPGRADE)):
        before = program_of(daemon())
        with open(MOUNT / f"kept-{number}", "wb", buffering=0) as file:
            file.write(FIRST)
            dpkg("--install", version)
            ended = run("fusecache", "upgrade", MOUNT)
            expect(ended.returncode == 0, ended.stderr)
            file.write(b"the rest")
        expect(program_of(daemon()) != before, f"{before} goes on")
        wait_until(
            "the file is in the bucket",
            lambda number=number: in_bucket(server, f"kept-{number}", FIRST + b"the rest"),
        )


def removing_is_refused_under_a_running_daemon(_: ServerProcess) -> None:
    for option in ("--remove", "--purge"):
        expect_refused(run("dpkg", option, "fusecache"), "a fusecache daemon still runs")
        expect(is_installed(), f"{option} was refused, and left it half done")
    expect((MOUNT / "first").read_bytes() == FIRST, "the file is not what it was")
    expect(run("fusecache", "status", MOUNT).returncode == 0, "the command is gone")


def removing_leaves_what_is_not_its_own(_: ServerProcess) -> None:
    systemctl("stop", UNIT)
    dpkg("--remove", "fusecache")
    for path in (OPT, UNIT_FILE, HELPER, Path("/usr/bin/fusecache")):
        expect(not os.path.lexists(path), f"{path} is still there")
    expect(not run("systemctl", "cat", UNIT).stdout, "systemd still has the unit")
    _configs_and_cache_are_there()


def purging_leaves_configs_and_caches(_: ServerProcess) -> None:
    dpkg("--purge", "fusecache")
    expect(not EXAMPLE.exists(), f"{EXAMPLE} is still there")
    _configs_and_cache_are_there()


def _configs_and_cache_are_there() -> None:
    expect(CONFIG.exists() and KEYS.exists() and any(CACHE.iterdir()), "a config or the cache is gone")


def installed_after_a_purge_it_goes_on(_: ServerProcess) -> None:
    dpkg("--install", PACKAGE)
    systemctl("start", UNIT)
    expect((MOUNT / "first").read_bytes() == FIRST, "the file is not what it was")
    systemctl("stop", UNIT)
    dpkg("--purge", "fusecache")


def installing_is_refused_beside_make_install(_: ServerProcess) -> None:
    HELPER.symlink_to("/srv/elsewhere/venv/bin/mount.fusecache")
    expect_refused(run("dpkg", "--install", PACKAGE), "First run `make uninstall`")
    HELPER.unlink()
    (OPT / "venv" / "bin").mkdir(parents=True)
    expect_refused(run("dpkg", "--install", PACKAGE), "First run `make uninstall`")
    expect(os.listdir(OPT) == ["venv"], f"half installed: {os.listdir(OPT)}")
    shutil.rmtree(OPT)
    expect(not UNIT_FILE.exists() and not is_installed(), "half installed")


CHECKS: list[Check] = [
    installing_again_changes_nothing,
    the_commands_work_from_anywhere,
    manual_and_completions_are_there,
    the_unit_has_no_complaints,
    make_refuses_beside_the_package,
    active_means_the_mount_answers,
    a_written_file_is_read_back_and_reaches_the_bucket,
    an_upgrade_leaves_a_running_daemon_alone,
    a_restart_runs_the_upgrade,
    another_version_takes_over_under_an_open_file,
    removing_is_refused_under_a_running_daemon,
    removing_leaves_what_is_not_its_own,
    purging_leaves_configs_and_caches,
    installed_after_a_purge_it_goes_on,
    installing_is_refused_beside_make_install,
]


def main() -> int:
    """Run all checks; 0 if all passed."""
    with ServerProcess() as server:
        CONFIG.write_text(
            f'source = "s3://{server.bucket}"\n'
            f'endpoint_url = "{server.endpoint_url}"\n'
            f'mountpoint = "{MOUNT}"\n'
            f'cache_dir = "{CACHE}"\n'
        )
        write_keys(server.access_key, server.secret_key)
        outcomes = [passes(check, server) for check in CHECKS]
    sys.stdout.write(f"{outcomes.count(True)} passed, {outcomes.count(False)} failed\n")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
