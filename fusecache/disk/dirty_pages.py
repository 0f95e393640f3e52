"""How many bytes of accepted writes the kernel holds before it writes them out."""

from pathlib import Path

_VM = Path("/proc/sys/vm")


def dirty_limit_bytes() -> int:
    """Return the limit of all dirty pages together, in bytes; 0 if the kernel does not report it.

    vm.dirty_bytes, else vm.dirty_ratio percent of the available memory (kernel: Documentation/admin-guide/sysctl/vm).
    """
    try:
        fixed = int((_VM / "dirty_bytes").read_text())
        if fixed:
            return fixed
        ratio = int((_VM / "dirty_ratio").read_text())
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 * ratio // 100
    except (OSError, ValueError, IndexError):
        pass
    return 0
