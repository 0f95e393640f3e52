#!/usr/bin/env bash
# A run with checkpoints and logs: `fusecache clean` lists what is old, then removes it, and keeps what a resume needs.
# Runs on a server of its own, or below a new prefix of the store in FUSECACHE_TEST_*; leaves nothing behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-.venv/bin/python}
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; wait; rm -rf "$folder"' EXIT

if [ -n "${FUSECACHE_TEST_ENDPOINT:-}" ]; then
    export AWS_ENDPOINT_URL=$FUSECACHE_TEST_ENDPOINT BUCKET=$FUSECACHE_TEST_BUCKET
    export AWS_ACCESS_KEY_ID=$FUSECACHE_TEST_ACCESS_KEY AWS_SECRET_ACCESS_KEY=$FUSECACHE_TEST_SECRET_KEY
else
    "$python" -m tests.s3server --directory "$folder/bucket" --bucket cleaning-example --write-interval 0 \
        --access-key key --secret-key secret >"$folder/facts" &
    server=$!
    until [ -s "$folder/facts" ]; do kill -0 "$server"; sleep 0.05; done
    AWS_ENDPOINT_URL=$("$python" -c 'import json, sys; print(json.load(sys.stdin)["endpoint_url"])' <"$folder/facts")
    export AWS_ENDPOINT_URL BUCKET=cleaning-example AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret
fi
export PREFIX="example-$$/"
place=$BUCKET/${PREFIX}run

# Another client, below the prefix. s3 put KEY...: writes objects of 10 bytes; s3 list: prints all keys.
s3() {
    "$python" - "$@" <<'PROGRAM'
import os
import sys

import boto3
from botocore.config import Config

client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="auto",
                      config=Config(s3={"addressing_style": "path"}))
bucket, prefix = os.environ["BUCKET"], os.environ["PREFIX"]
for key in sys.argv[2:]:
    client.put_object(Bucket=bucket, Key=prefix + key, Body=b"0123456789")
if sys.argv[1] == "list":
    found = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    print(*(row["Key"].removeprefix(prefix) for row in found))
PROGRAM
}

# clean STATUS WORDS FLAG...: runs the command, which must end so, and say so.
clean() {
    local wanted=$1 words=$2 status=0
    shift 2
    echo "\$ fusecache clean s3://$place $*"
    "$python" -m fusecache clean "s3://$place" --log "$folder/clean.log" "$@" </dev/null \
        >"$folder/words" 2>&1 || status=$?
    cat "$folder/words"
    if [ "$status" != "$wanted" ] || ! grep -qF -- "$words" "$folder/words"; then
        echo "FAILED  exit status $status, expected $wanted and: $words" >&2
        exit 1
    fi
}

# left PROMISE KEY...: the bucket must hold exactly these keys.
left() {
    local promise=$1 found
    shift
    found=$(s3 list)
    if [ "$found" != "$*" ]; then
        echo "FAILED  $promise: the bucket holds $found, expected $*" >&2
        exit 1
    fi
    echo "ok      $promise"
    echo
}

whole() { for step in "$@"; do echo "run/step-$step/.metadata run/step-$step/model.pt"; done; }
# shellcheck disable=SC2046  # keys without spaces
s3 put $(whole 100 200) run/step-250/model.pt $(whole 300) run/step-400/model.pt run/train.log run/train.log.tmp other/file
all="other/file $(whole 100 200) run/step-250/model.pt $(whole 300) run/step-400/model.pt run/train.log run/train.log.tmp"
sleep 2 # what was written after the start of the command always stays

clean 0 "0 objects, 0 B would go" --keep-checkpoints 2
# shellcheck disable=SC2086
left "what is younger than an hour stays" $all

clean 0 "2 objects, 20 B, \$0 a month would go; nothing was removed: add --delete" \
    --keep-checkpoints 2 --even-recent --price-per-gb 0.02
# shellcheck disable=SC2086
left "without --delete nothing is removed" $all

clean 0 "2 objects, 20 B removed" --keep-checkpoints 2 --even-recent --delete
# shellcheck disable=SC2046
left "the newest two whole checkpoints stay, and so do incomplete ones" other/file $(whole 200) \
    run/step-250/model.pt $(whole 300) run/step-400/model.pt run/train.log run/train.log.tmp

clean 0 "1 object, 10 B removed" --keep-checkpoints 2 --even-recent --incomplete --delete
# shellcheck disable=SC2046
left "an incomplete checkpoint goes on request, but not one that may be being written" other/file $(whole 200 300) \
    run/step-400/model.pt run/train.log run/train.log.tmp

clean 0 "1 object, 10 B removed" --suffix .tmp --even-recent --delete
# shellcheck disable=SC2046
left "names select objects" other/file $(whole 200 300) run/step-400/model.pt run/train.log

clean 1 "confirm with --yes-wipe $place" --wipe --even-recent --delete
clean 0 "6 objects, 60 B removed" --wipe --even-recent --delete --yes-wipe "$place"
left "a wipe needs the name once more, and ends at the prefix" other/file

[ "$(wc -l <"$folder/clean.log")" = 10 ] || { echo "FAILED  the log has not a line for each object" >&2; exit 1; }
echo "ok      the log has a line for each of the 10 objects"
place=$BUCKET/${PREFIX}other
clean 0 "1 object, 10 B removed" --wipe --even-recent --delete --yes-wipe "$place"
