"""Defaults of the options for a kind of use: `profile_for`. An option that is set anywhere wins over its profile."""

from typing import Any, NamedTuple


class ProfileDefault(NamedTuple):
    """The default of one option, as the option takes it and as a mount has it, and why."""

    name: str
    text: str
    value: object
    reason: str


PROFILES: dict[str, tuple[ProfileDefault, ...]] = {
    "training": (
        ProfileDefault(
            "attribute_seconds", "10s", 10.0, "names of a data set rarely change: a tenth of the LISTs"
        ),
        ProfileDefault("drain_timeout", "30m", 1800.0, "a stop waits longer for a bucket that is away"),
    ),
    "checkpoints": (
        ProfileDefault("settle_seconds", "0.2s", 0.2, "a closed file is sooner in the bucket"),
        ProfileDefault(
            "delete_delay", "10m", 600.0, "trainers delete the old checkpoint before the new one is uploaded"
        ),
        ProfileDefault("drain_timeout", "1h", 3600.0, "a stop waits longer for a bucket that is away"),
    ),
    "serving": (
        ProfileDefault(
            "read_only", "true", value=True, reason="a server writes nothing, and its keys need not allow it"
        ),
        ProfileDefault("attribute_seconds", "1m", 60.0, "a new model is seen within a minute, for few LISTs"),
    ),
}


def profiles_text() -> str:
    """Return what each profile changes, in one line."""
    return "; ".join(
        f"{kind}: {', '.join(f'{each.name} = {each.text}' for each in defaults)}"
        for kind, defaults in PROFILES.items()
    )


def profile_defaults(kind: str | None) -> dict[str, Any]:
    """Return the defaults of a profile by option; none without one."""
    return {each.name: each.value for each in PROFILES[kind]} if kind else {}
