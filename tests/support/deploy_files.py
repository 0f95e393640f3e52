"""The commands in examples/deploy, of compose files and of Kubernetes' manifests, as their platforms start them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support import ROOT

DEPLOY = ROOT / "examples" / "deploy"
# Words, and the variables that the container has.
Command = tuple[list[str], dict[str, str]]


def compose_commands(path: Path, environment: Mapping[str, str]) -> list[Command]:
    """Return what the services of a compose file start. environment: of who calls compose; "" for what it lacks."""

    def filled(text: str) -> str:
        # A variable of compose's own, and `$$` for a dollar sign.
        text = re.sub(
            r"(?<!\$)\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda m: environment.get(m[1], m[2] or ""), text
        )
        return text.replace("$$", "$")

    return [
        (
            [filled(word) for word in [*service["entrypoint"], *service.get("command", [])]],
            {name: filled(value) for name, value in service.get("environment", {}).items()},
        )
        for service in yaml.safe_load(path.read_text())["services"].values()
    ]


def pod_commands(path: Path) -> list[Command]:
    """Return what the containers of a manifest's pods start. A variable from a Secret has no value here."""
    found: list[Command] = []
    for document in yaml.safe_load_all(path.read_text()):
        spec: dict[str, Any] = document["spec"]  # a Service has no containers
        spec = spec.get("template", {}).get("spec", spec)
        for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
            given = {row["name"]: row["value"] for row in container.get("env", [])}
            given |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""} if "envFrom" in container else {}
            found.append(([*container["command"], *container.get("args", [])], given))
    return found
