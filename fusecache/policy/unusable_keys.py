"""Finds the keys of a bucket that no path on the mount can name. Pure."""

from fusecache.model.names import CONTROL_NAME, unusable_name


class UnusableKeys:
    """Finds the keys that the mount cannot show, in one pass over the bucket in key order, with bounded memory."""

    def __init__(self) -> None:
        # Keys that may be prefixes of later ones. Each begins with the one before it.
        self._stems: list[str] = []

    def see(self, key: str, size: int = 0) -> list[tuple[str, str]]:
        """Return (key, reason) of the keys that this key shows to be unusable: itself or earlier ones.

        key: without the mount's prefix. size: of its object. Keys come in the order of their UTF-8 bytes, as LIST
        returns them.
        """
        if not key:
            return []  # the marker of the mount's own prefix
        found = []
        while self._stems and not key.startswith(self._stems[-1]):
            self._stems.pop()
        for stem in list(self._stems):
            if key.startswith(stem + "/"):
                found.append((stem, "it is also a directory, which shows instead"))
                self._stems.remove(stem)
        parts = key.removesuffix("/").split("/")
        why = next((reason for part in parts if (reason := unusable_name(part))), None)
        if why is None and parts[0] == CONTROL_NAME:
            why = "this name in the mount's root is reserved for the daemon's control files"
        if why is None and size and key.endswith("/"):
            why = "it is a directory, whose content no path shows"
        if why is not None:
            found.append((key, why))
        elif not key.endswith("/"):
            self._stems.append(key)
        return found
