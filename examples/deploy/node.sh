#!/usr/bin/env bash
# One script for a rented node; the YAML files beside it call it.
#
#   node.sh install         FUSE and fusecache, unless they are there
#   node.sh run COMMAND…    mount BUCKET at MOUNT, run COMMAND, upload what it wrote, unmount
#
# On SIGTERM COMMAND gets the signal, and 70 % of SYNC_DEADLINE to save; the rest is for the last uploads. Files that the
# bucket lacks after that are named. The exit status is that of COMMAND, or 1 if it succeeded and the bucket lacks something.
#
#   BUCKET           s3://NAME[/PREFIX]; the keys are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
#   AWS_ENDPOINT_URL  the store, unless it is AWS
#   MOUNT            where the bucket is shown [/data]
#   CACHE_DIR        on a fast local disk [/var/tmp/fusecache]
#   WARM             names below MOUNT that the daemon fetches while COMMAND starts, separated by blanks
#   SYNC_DEADLINE    the time from the notice to the end of the node, less a reserve [25s]
#   PEERS            nodes that read the same data, this one among them, such as gpu1:9470,gpu2:9470: they fill from each other
#   PEERS_KEY_FILE   their key [/etc/fusecache/peers.key]: openssl rand -hex 32; chmod 600
#   PACKAGE          what pip installs [the checkout that this script is in, with mount,loader]
#   VENV             where to [/opt/fusecache/venv]
#   APT              how system packages get here; empty: they are there [apt-get install --yes --no-install-recommends]
set -euo pipefail

MOUNT=${MOUNT:-/data} CACHE_DIR=${CACHE_DIR:-/var/tmp/fusecache} SYNC_DEADLINE=${SYNC_DEADLINE:-25s} WARM=${WARM:-}
PACKAGE=${PACKAGE:-$(cd "$(dirname "$0")/../.." && pwd)[mount,loader]} VENV=${VENV:-/opt/fusecache/venv}
PEERS=${PEERS:-} PEERS_KEY_FILE=${PEERS_KEY_FILE:-/etc/fusecache/peers.key}
APT=${APT-apt-get install --yes --no-install-recommends}
PATH=$PATH:$VENV/bin
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

install() {
    if command -v fusecache >/dev/null && fusecache doctor >/dev/null; then return; fi
    if [ -n "$APT" ]; then
        as_root apt-get update
        # shellcheck disable=SC2086 # words
        as_root env DEBIAN_FRONTEND=noninteractive $APT fuse3 python3-venv
    fi
    as_root python3 -m venv "$VENV"
    as_root "$VENV/bin/pip" install --quiet "$PACKAGE"
    # 1 is a warning, of a small disk for example; 2 is something that you must do first.
    fusecache doctor || [ $? = 1 ]
}

run() {
    : "${BUCKET:?is not set: which bucket? BUCKET=s3://NAME}"
    local peers=()
    [ -z "$PEERS" ] || peers=(--peers "$PEERS" --peers-key-file "$PEERS_KEY_FILE")
    # The command's own shell: it begins the warm-up, which goes on in the background, and becomes the command. What
    # serves the other nodes is ended by `run`, after the command.
    # shellcheck disable=SC2016
    local begin='[ -z "$PEERS" ] || fusecache serve "$MOUNT" --listen 0.0.0.0:9470 --peers-key-file "$PEERS_KEY_FILE" &
        for name in $WARM; do fusecache warm "$MOUNT/$name" || true; done; exec "$@"'
    export MOUNT WARM PEERS PEERS_KEY_FILE
    exec fusecache run "$BUCKET" "$MOUNT" --cache-dir "$CACHE_DIR" --sync-deadline "$SYNC_DEADLINE" \
        ${peers[@]+"${peers[@]}"} -- \
        bash -c "$begin" node.sh "$@"
}

case ${1:-} in
    install) install ;;
    run) shift; run "$@" ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d' >&2; exit 2 ;;
esac
