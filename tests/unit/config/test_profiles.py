"""`profile_for`: other defaults, below everything that is set."""

from pathlib import Path
from typing import Any

import pytest

from fusecache.config.options import FIELDS, load_options, shown_options
from fusecache.config.profiles import PROFILES
from fusecache.model.errors import ConfigError

PLACE = {"source": "s3://bucket", "mountpoint": "/mnt", "cache_size": "1GiB"}


def shown(flags: dict[str, object], environment: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """Return the options in force."""
    found = load_options({**PLACE, **flags}, environment or {}, home=Path("/home/u"), **more)
    options: dict[str, Any] = shown_options(found)["options"]
    return options


@pytest.mark.parametrize("kind", PROFILES)
def test_a_profile_changes_the_defaults_that_its_table_names_and_no_other(kind: str) -> None:
    plain, changed = shown({}), shown({"profile_for": kind})
    differing = {name: value for name, value in changed.items() if value != plain[name]}
    assert differing == {"profile_for": kind, **{each.name: each.value for each in PROFILES[kind]}}
    for each in PROFILES[kind]:
        # The text is what a person would write for that value.
        assert FIELDS[each.name].metadata["parse"](each.text) == each.value
        assert each.reason


def test_what_is_set_anywhere_wins_over_the_profile(tmp_path: Path) -> None:
    file = tmp_path / "mount.toml"
    file.write_text('profile_for = "checkpoints"\nsettle_seconds = "3s"\n')
    found = shown({"drain_timeout": "2m"}, {"FUSECACHE_DELETE_DELAY": "5s"}, config_path=file)
    assert (found["settle_seconds"], found["delete_delay"], found["drain_timeout"]) == (3.0, 5.0, 120.0)
    assert shown({"profile_for": "serving", "read_only": False})["read_only"] is False


def test_an_unknown_profile_is_one_clear_line() -> None:
    with pytest.raises(ConfigError) as failed:
        shown({"profile_for": "gaming"})
    assert str(failed.value) == ("--profile-for = 'gaming': allowed is one of training, checkpoints, serving")
