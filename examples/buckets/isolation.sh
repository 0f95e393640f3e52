#!/usr/bin/env bash
# Two buckets, each with a key for reading and a key for writing: `fusecache access` shows that no key does more than
# it should, and finds the key that does. Runs on a server of its own, or on Ceph's gateway below
# `tests/ceph/ceph.py run --`; leaves nothing behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-.venv/bin/python}
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; wait; rm -rf "$folder"' EXIT

# Starts the server with some keys, each KEY:SECRET:read|write:BUCKET; ends the one before. On Ceph: sets their rights.
serve() {
    if [ -n "${CEPH_CONF:-}" ]; then
        "$python" -m examples.buckets.ceph_keys "$@"
        export R2_DATASET_ENDPOINT_URL=$FUSECACHE_TEST_ENDPOINT R2_GRADIENTS_ENDPOINT_URL=$FUSECACHE_TEST_ENDPOINT
        return
    fi
    local accounts=()
    for each in "$@"; do accounts+=(--account "$each"); done
    [ -z "$server" ] || { kill "$server"; wait "$server" || true; }
    : >"$folder/facts"
    "$python" -m tests.s3server --directory "$folder/bucket" "${accounts[@]}" >"$folder/facts" &
    server=$!
    until [ -s "$folder/facts" ]; do kill -0 "$server"; sleep 0.05; done
    endpoint=$("$python" -c 'import json, sys; print(json.load(sys.stdin)["endpoint_url"])' <"$folder/facts")
    export R2_DATASET_ENDPOINT_URL=$endpoint R2_GRADIENTS_ENDPOINT_URL=$endpoint
}

# check PROMISE STATUS WORDS: runs `fusecache access` on both families; it must end so, and say so.
check() {
    local status=0
    "$python" -m fusecache access --credentials-from R2_DATASET --credentials-from R2_GRADIENTS \
        >"$folder/words" 2>&1 || status=$?
    cat "$folder/words"
    if [ "$status" != "$2" ] || ! grep -qF "$3" "$folder/words"; then
        echo "FAILED  $1: exit status $status, expected $2 and: $3" >&2
        exit 1
    fi
    echo "ok      $1"
    echo
}

export R2_DATASET_BUCKET_NAME=dataset R2_GRADIENTS_BUCKET_NAME=gradients
for family in R2_DATASET R2_GRADIENTS; do
    for role in READ WRITE; do
        export "${family}_${role}_ACCESS_KEY_ID=$family-$role" "${family}_${role}_SECRET_ACCESS_KEY=secret"
    done
done
tight=(R2_DATASET-WRITE:secret:write:dataset
    R2_GRADIENTS-READ:secret:read:gradients R2_GRADIENTS-WRITE:secret:write:gradients)

serve R2_DATASET-READ:secret:read:dataset "${tight[@]}"
check "each key opens its own bucket only, and keys for reading only read" 0 \
    "every key can do what it should, and no more"

serve R2_DATASET-READ:secret:write:dataset "${tight[@]}"
check "a key for reading that may write is found" 1 "wrong: R2_DATASET read: put, delete, multipart, conditional in s3://dataset: allowed"

serve R2_DATASET-READ:secret:read:gradients "${tight[@]}"
check "a key that opens another bucket is found" 1 "wrong: R2_DATASET read: list, get in s3://gradients: allowed"

if [ -n "${CEPH_CONF:-}" ]; then
    left=$(serve "${tight[@]}" | grep -vc ": 0 objects" || true)
    export R2_DATASET_ENDPOINT_URL=http://127.0.0.1:1 R2_GRADIENTS_ENDPOINT_URL=http://127.0.0.1:1
else
    kill "$server"
    wait "$server" || true
    server=
    left=$(find "$folder/bucket" -path '*/objects/*' -o -path '*/uploads/*' | wc -l)
fi
check "a bucket that does not answer is unknown, not denied" 2 "unknown: R2_DATASET read: list"

[ "$left" = 0 ] || { echo "FAILED  $left objects and uploads are left in the buckets" >&2; exit 1; }
echo "ok      nothing is left in the buckets"
