"""The page of a mount as HTML: a status and the samples of the last hour, in the frame of `page.html`.

All of it is made here, so that a browser without JavaScript shows it too. With JavaScript, the page fetches itself
every few seconds and exchanges its <main>.

Invariants:
1. Whatever comes from the status passes `_text`: a writer of the bucket chooses the names of its files.
2. The number of rows is bounded, so the size of the page is.
3. The policy (CSP) of HEADERS allows the script and the style of the frame by their hashes, and nothing else.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from fusecache.model.format_text import (
    at_mount,
    count_text,
    printable,
    seconds_text,
    short_text,
    size_text,
)
from fusecache.model.status_text import only_here_lines, shown_jobs
from fusecache.model.verdict import findings, verdict_line
from fusecache.page.history import HOUR_SECONDS, Sample

# The cells of a row of a table, and which part of it is done, if that is known.
Row = tuple[Sequence[str], float | None]
# Rows of each table. Counts cover the others.
_ROWS = 12
_FRAME = Path(__file__).with_name("page.html").read_text()
_MARK = re.compile(r"\{\{(\w+)\}\}")
_WORDS = {"OK": "Everything works."}
# Curves are drawn in units of 5 s and of 1/100 of their height.
_WIDTH, _HEIGHT = 720, 100


def _hash_of(tag: str) -> str:
    content = _FRAME.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


# Of every answer of the server.
HEADERS = (
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)


def page(status: Mapping[str, Any], samples: Sequence[Sample]) -> str:
    """Return the page of a status. samples: of the last hour, the oldest first."""
    parts = {
        "title": _text(f"{status['verdict']} · {status['mountpoint']}"),
        "verdict": _text(status["verdict"]),
        "mountpoint": _text(status["mountpoint"]),
        "source": _text(status["source"]),
        "time": f"{datetime.now().astimezone():%H:%M:%S}",
        "main": "\n".join(_main(status, samples)),
        "stopped": _stopped(status),
    }
    return _MARK.sub(lambda found: parts[found[1]], _FRAME)


def _main(status: Mapping[str, Any], samples: Sequence[Sample]) -> Iterator[str]:
    mountpoint = status["mountpoint"]
    yield _verdict(status)
    yield '<div class="two">'
    yield _only_here(status)
    yield _cache(status)
    yield "</div>"
    yield from _curves(status, samples)
    yield _checkpoints(status)
    yield _files(status)
    yield _jobs(status)
    facts = {
        "mount": f"{status['source']} at {mountpoint}, "
        f"{'read-only' if status['options'].get('read_only') else 'read-write'}",
        "endpoint": status["endpoint"],
        "daemon": f"fusecache {status['version']}, pid {status['pid']}, "
        f"up for {seconds_text(status['uptime_seconds'])}",
        "log": status["log"],
    }
    rows = "".join(f"<dt>{name}</dt><dd>{_text(text)}</dd>" for name, text in facts.items() if text)
    yield f"<dl>{rows}</dl>"


def _text(text: object) -> str:
    """Return text as HTML: invisible characters are shown, and commands in backticks are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(printable(str(text))))


# ---- what to know first


def _verdict(status: Mapping[str, Any]) -> str:
    level, mountpoint = status["verdict"], status["mountpoint"]
    rest = verdict_line(status).removeprefix(level).lstrip(":, ") or _WORDS.get(level, "")
    found = [each for each in findings(status) if each.line]
    return (
        f'<section class="verdict" role="status"><h1>{_text(level)}</h1>'
        f"<p>{_text(at_mount(rest[:1].upper() + rest[1:], mountpoint))}</p>"
        f"{_lines('What to do', [each.line for each in found if each.is_to_do], mountpoint, _ROWS)}"
        f"{_lines('Passes by itself', [each.line for each in found if not each.is_to_do], mountpoint, 3)}</section>"
    )


def _lines(title: str, lines: Sequence[str], mountpoint: str, most: int) -> str:
    rows = "".join(f"<li>{_text(at_mount(line, mountpoint))}</li>" for line in lines[:most])
    if len(lines) > most:
        rows += f'<li class="quiet">and {len(lines) - most} more</li>'
    return f"<h2>{title}</h2><ul>{rows}</ul>" if rows else ""


def _only_here(status: Mapping[str, Any]) -> str:
    lost = status["exposed_bytes"] + status["aside_bytes"]
    lines = list(only_here_lines(status, most_files=0))
    if lost or (len(lines) == 1 and "every closed file" in lines[0]):
        lines = lines[1:]  # in large letters
    head, words = size_text(lost), "would be lost with this node now"
    if not lost and not lines:
        head, words = "Nothing", "would be lost with this node: the bucket has every closed file"
    rest = "".join(f"<li>{_text(at_mount(line, status['mountpoint']))}</li>" for line in lines)
    return _card("Only on this node", f'<p class="big">{head}</p><p>{words}</p><ul class="plain">{rest}</ul>')


def _cache(status: Mapping[str, Any]) -> str:
    cache = status["cache"]
    used, waits, limit = cache["used_bytes"], cache["staging_bytes"], max(1, cache["limit_bytes"])
    reads = cache["hits"] + cache["misses"]
    hits = (
        f"{cache['hits'] / reads:.1%} of reads did not wait for the bucket, since the start" if reads else ""
    )
    bar = _bar(("bucket", (used + waits) / limit), ("disk", used / limit))
    legend = _legend([("disk", f"cached {size_text(used)}"), ("bucket", f"not uploaded {size_text(waits)}")])
    return _card(
        "Cache",
        f'<p class="big">{size_text(used + waits)}</p><p>of {size_text(limit)}{_text(short_text(status))}</p>'
        f'{bar}{legend}<p class="quiet">{hits}</p>',
    )


def _bar(*parts: tuple[str, float]) -> str:
    """Return a bar. parts: the colour of each, and where it ends, from the longest to the shortest."""
    rects = "".join(
        f'<rect class="{name}" width="{round(1000 * min(1.0, end))}" height="10"/>'
        for name, end in (("rest", 1.0), *parts)
    )
    frame = 'class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true"'
    return f"<svg {frame}>{rects}</svg>"


def _card(title: str, body: str, kind: str = "") -> str:
    return f'<section class="card {kind}"><h2>{title}</h2>{body}</section>'


# ---- the last hour


def _curves(status: Mapping[str, Any], samples: Sequence[Sample]) -> Iterator[str]:
    def rate(value: float) -> str:
        return f"{size_text(value)}/s"

    yield '<div class="two">'
    reads = ("memory", "disk", *(("peer",) if status.get("peers", {}).get("nodes") else ()), "bucket")
    yield _curve("Reads", samples, {each: f"{each}_bytes" for each in reads}, rate, is_stacked=True)
    yield _curve("Network", samples, {"uploads": "sent_bytes", "downloads": "fetched_bytes"}, rate)
    yield _curve("Requests", samples, {"requests": "requests"}, lambda value: f"{value:.1f}/s")
    if status["costs"]["prices"]:
        yield _curve("Cost of requests", samples, {"dollars": "dollars"}, lambda value: f"${value:.2f} a day")
    yield "</div>"


def _curve(
    title: str, samples: Sequence[Sample], series: Mapping[str, str], words: Any, *, is_stacked: bool = False
) -> str:
    """Return curves in one frame. series: the field of a sample by the name of each. words: of a value."""
    columns = {name: [getattr(each, key) or 0.0 for each in samples] for name, key in series.items()}
    if is_stacked:  # each with those before it, and drawn after those after it
        total = [0.0] * len(samples)
        for name, values in columns.items():
            columns[name] = total = [below + value for below, value in zip(total, values, strict=True)]
    peak = max((max(values, default=0.0) for values in columns.values()), default=0.0)
    last = samples[-1] if samples else None
    xs = [round(_WIDTH - (samples[-1].uptime - each.uptime) * _WIDTH / HOUR_SECONDS) for each in samples]
    shapes = ""
    for name, values in reversed(columns.items()):
        ys = [round(_HEIGHT * (1 - value / peak)) if peak else _HEIGHT for value in values]
        points = " ".join(f"{x},{y}" for x, y in zip(xs, ys, strict=True))
        if points and is_stacked:
            shapes += f'<polygon class="{name}" points="{xs[0]},{_HEIGHT} {points} {_WIDTH},{_HEIGHT}"/>'
        elif points:
            shapes += f'<polyline class="{name}" points="{points}"/>'
    now = {name: (getattr(last, key) or 0.0) if last else 0.0 for name, key in series.items()}
    texts = [(name, f"{name} {words(value)}") for name, value in now.items()]
    legend = _legend(texts) if len(texts) > 1 else ""
    big = words(sum(now.values())) if is_stacked or len(series) == 1 else ""
    return (
        f'<figure class="card"><figcaption><h2>{title}</h2><b>{big}</b></figcaption>'
        f'<div class="plot"><span>{words(peak) if peak else ""}</span>'
        f'<svg viewBox="0 -2 {_WIDTH} {_HEIGHT + 4}" preserveAspectRatio="none" role="img" '
        f'aria-label="{title}, last hour">'
        f'{shapes}<path class="axis" d="M0 {_HEIGHT}H{_WIDTH}"/></svg></div>'
        f'<div class="hour"><span>1 h ago</span><span>30 min</span><span>now</span></div>{legend}</figure>'
    )


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    spans = "".join(f'<span class="{name}">{words}</span>' for name, words in entries)
    return f'<p class="legend">{spans}</p>'


# ---- tables


def _checkpoints(status: Mapping[str, Any]) -> str:
    found = status["pending_checkpoints"]
    rows: list[Row] = []
    for each in found[:_ROWS]:
        below = f"{each['path'].rstrip('/')}/"
        codes = [row["code"] for row in status["waiting"] if row["path"].startswith(below)]
        state = f"waits: {codes[0]}" if codes else "uploads" if each["sent"] else "waits for its turn"
        if any(row["path"].startswith(below) for row in status["writing"]):
            state = "is written"
        words, part = _sent(each)
        rows.append(((each["path"], f"{state}, {count_text(each['files'], 'file')}", words), part))
    return _table("Checkpoints not in the bucket yet", ("checkpoint", "state", "sent"), rows, len(found))


def _sent(each: Mapping[str, Any]) -> tuple[str, float]:
    return f"{size_text(each['sent'])} of {size_text(each['bytes'])}", each["sent"] / max(1, each["bytes"])


def _files(status: Mapping[str, Any]) -> str:
    rows: dict[str, Row] = {}  # by path, the gravest state
    # The cause is above, with what to do.
    states = {"rejected": "rejected", "waiting": "waits", "conflicts": "in conflict", "uploading": "uploads"}
    for group, state in {**states, "writing": "is written"}.items():
        for each in status[group]:
            words, part = _sent(each) if group == "uploading" else ("", None)
            code = f": {each['code']}" if each.get("code") else ""
            rows.setdefault(each["path"], ((each["path"], state + code, words), part))
    count = sum(status[f"{kind}_files"] for kind in ("pending", "rejected", "conflict", "dirty"))
    shown = list(rows.values())[:_ROWS]
    return _table("Files not in the bucket yet", ("file", "state", "sent"), shown, max(count, len(rows)))


def _jobs(status: Mapping[str, Any]) -> str:
    jobs = shown_jobs(status["hints"])
    rows: list[Row] = []
    for job in jobs[:_ROWS]:
        read = job["hit_bytes"] + job["missed_bytes"]
        pace = f", {seconds_text(job['seconds_a_step'])} each" if job["seconds_a_step"] else ""
        waits = [f"{job['late']} late"] if job["late"] else []
        waits += [f"{size_text(job['missed_bytes'])} from the bucket"] if job["missed_bytes"] else []
        ahead = f"{count_text(job['horizon_steps'], 'step')}, {seconds_text(job['lead_seconds'])}"
        ahead += f", {size_text(job['horizon_bytes'])}"
        step = "has ended" if job["ended_seconds"] else f"{job['step']}{pace}"
        cached = f"{job['hit_bytes'] / read:.1%}" if read else ""
        rows.append(((job["job"], step, ahead, cached, ", ".join(waits) or "none"), None))
    table = _table("Jobs", ("job", "step", "prefetched", "cached", "waits"), rows, len(jobs))
    waiting = status["reads_waiting"]
    if waiting["reads"]:
        reads, longest = count_text(waiting["reads"], "read"), seconds_text(waiting["seconds"])
        table += _card("Reads that wait for the bucket", f"<p>{reads}, the longest for {longest}</p>", "wide")
    return table


def _table(title: str, heads: Sequence[str], rows: Sequence[Row], count: int) -> str:
    """Return a table. count: of all rows, also of those not shown."""
    if not count:
        return ""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = ""
    for (first, *others), part in rows:
        cells = f"<td>{_text(first)}</td>"
        for name, other in zip(heads[1:], others, strict=True):
            is_last = name == heads[-1]
            bar = _bar(("disk", part)) if is_last and part is not None else ""
            cells += f'<td data-name="{name}">{_text(other)}{bar}</td>' if other else "<td></td>"
        body += f"<tr>{cells}</tr>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    if rest := count - len(rows):
        words = f"and {count_text(rest, 'other')}" if rows else f"{count_text(rest, 'change')} in the queue"
        table += f'<p class="quiet">{words}</p>'
    return _card(title, table, "wide")


# ---- the end


def _stopped(status: Mapping[str, Any]) -> str:
    """Return what to do once the daemon does not answer any more."""
    mountpoint = status["mountpoint"]
    place = status["options"].get("cache_dir", "")
    keeper = (
        "Its keeper starts it again, and programs wait. " if status["options"].get("keep_mounted") else ""
    )
    lines = (
        f"{keeper}If it does not come back: {at_mount('`fusecache status`', mountpoint)} on the node says why.",
        f"What was not uploaded is in {place}: the next mount uploads it.",
    )
    return "".join(f"<li>{_text(line)}</li>" for line in lines)
