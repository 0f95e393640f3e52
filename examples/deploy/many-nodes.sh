#!/usr/bin/env bash
# On each of some nodes: mount BUCKET at MOUNT, and serve its cache to the other nodes until SIGTERM. The mount stays.
#
#   many-nodes.sh gpu1:9470,gpu2:9470      all nodes, this one among them
#
#   BUCKET           s3://NAME[/PREFIX]; the keys are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
#   AWS_ENDPOINT_URL  the store, unless it is AWS
#   MOUNT            where the bucket is shown [/data]
#   CACHE_DIR        on a fast local disk [/var/tmp/fusecache]
#   PEERS_KEY_FILE   the key of all nodes [/etc/fusecache/peers.key]: openssl rand -hex 32; chmod 600
set -euo pipefail

MOUNT=${MOUNT:-/data} CACHE_DIR=${CACHE_DIR:-/var/tmp/fusecache} PEERS_KEY_FILE=${PEERS_KEY_FILE:-/etc/fusecache/peers.key}
: "${BUCKET:?is not set: which bucket? BUCKET=s3://NAME}" "${1:?all nodes: many-nodes.sh gpu1:9470,gpu2:9470}"

fusecache unmount --if-dead "$MOUNT"
mkdir -p "$MOUNT"
mountpoint --quiet "$MOUNT" ||
    fusecache mount "$BUCKET" "$MOUNT" --cache-dir "$CACHE_DIR" --peers "$1" --peers-key-file "$PEERS_KEY_FILE"
exec fusecache serve "$MOUNT" --listen 0.0.0.0:9470 --peers-key-file "$PEERS_KEY_FILE"
