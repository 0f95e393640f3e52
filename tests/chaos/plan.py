"""Which faults come when: drawn from a seed before the run, so that a run can be repeated."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Three or four faults overlap: one of each lane at most. (shortest, longest) in seconds.
ANSWERS = {
    "5xx": (5, 40), "5xx after the effect": (5, 30), "403": (5, 60), "501": (5, 30), "resets": (5, 30),
    "lost answers": (5, 30), "short bodies": (5, 30),
}  # fmt: skip
WAYS = {
    "silent": (5, 60), "refused": (5, 60), "slow": (10, 60), "keys revoked": (10, 60), "clock jump": (10, 40),
}  # fmt: skip
# Where a copy of the data is at another endpoint.
COPY = {"other bytes": (10, 60)}
NODE = {"daemon stopped": (1, 20), "daemon killed": (0, 8), "socket flooded": (5, 20)}
# Of a mount that outlives its daemon: no program sees it, so it may come together with all others.
KILLS = {"daemon killed": (0, 8)}
# These need root, loop devices or control groups: a whole machine.
WHOLE_MACHINE = {
    "disk full": (5, 40), "disk hangs": (2, 12), "disk read-only": (5, 20), "disk EIO": (5, 20),
    "little memory": (10, 40),
}  # fmt: skip
# It lasts until the next may come.
PROGRAMS = {"writer killed": (5, 40)}

# Between two faults of a lane.
PAUSE_SECONDS = (4.0, 25.0)
# Without faults, at the end of each PERIOD: whatever does not heal is found near its cause.
REST_SECONDS = 75.0
PERIOD_SECONDS = 360.0
# Daemons that start with few descriptors.
FEW_DESCRIPTORS_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault: seconds since the start of the run, and a number for its own choices."""

    kind: str
    start: float
    seconds: float
    choice: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The lanes, each with faults one after the other; and the moments at which all must be well again."""

    lanes: dict[str, list[Planned]]
    rests: list[float]

    def server_of(self, fault: Planned) -> int:
        """Return which of two servers has the bucket's faults then: the second, and after each rest the other one."""
        return (1 + sum(rest <= fault.start for rest in self.rests)) % 2


def draw_plan(
    seed: int,
    minutes: float,
    *,
    whole_machine: bool,
    has_copy: bool = False,
    is_kept: bool = False,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Plan:
    """Draw all faults. only, without: kinds, to narrow a finding down.

    has_copy: of the data, at another endpoint. is_kept: the mount outlives its daemon.
    """
    node = {kind: seconds for kind, seconds in NODE.items() if not (is_kept and kind in KILLS)}
    lanes = {
        "answers": ANSWERS,
        "ways": {**WAYS, **(COPY if has_copy else {})},
        "node": {**node, **(WHOLE_MACHINE if whole_machine else {})},
        "programs": PROGRAMS,
        **({"kills": KILLS} if is_kept else {}),
    }
    total = minutes * 60
    rests = [end for end in _steps(PERIOD_SECONDS, total) if end + REST_SECONDS / 2 < total]
    planned = {name: list(_draw_lane(seed, name, kinds, total, rests)) for name, kinds in lanes.items()}
    return Plan(
        {
            name: [each for each in faults if (not only or each.kind in only) and each.kind not in without]
            for name, faults in planned.items()
        },
        rests,
    )


def _draw_lane(
    seed: int, name: str, kinds: dict[str, tuple[int, int]], total: float, rests: list[float]
) -> list[Planned]:
    rng = random.Random(f"{seed} {name}")
    found: list[Planned] = []
    deck: list[str] = []
    now = rng.uniform(*PAUSE_SECONDS)
    while now < total:
        # Each kind comes once before any comes again.
        if not deck:
            deck = rng.sample(sorted(kinds), len(kinds))
        kind = deck.pop()
        seconds, choice = rng.uniform(*kinds[kind]), rng.getrandbits(30)
        rest = next((end for end in rests if now + seconds > end - REST_SECONDS and now < end), None)
        if rest is not None:
            now = rest + rng.uniform(*PAUSE_SECONDS)
        if now + seconds < total:
            found.append(Planned(kind, now, seconds, choice))
        now += seconds + rng.uniform(*PAUSE_SECONDS)
    return found


def _steps(step: float, total: float) -> list[float]:
    return [step * number for number in range(1, int(total / step) + 1)]
