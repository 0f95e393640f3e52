#!/bin/bash
# The `run` of skypilot.yaml and the `command` of mpt-125m-r2.yaml, with a small model in place of MPT-125M: to the end of
# the training, and ended in the middle. As root, on a machine where `node.sh install` was run; CLOUD_PYTHON names a Python with
# SkyPilot and MosaicML's mcli, which check the files.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
here=examples/deploy/cloud

if [ -n "${CLOUD_PYTHON:-}" ]; then
    export HOME=$folder/home
    mkdir "$HOME"
    check "SkyPilot accepts its file" "$CLOUD_PYTHON" -c "import sky; sky.Task.from_yaml('$here/skypilot.yaml')"
    check "mcli accepts its file" "$CLOUD_PYTHON" -W ignore -c "import mcli; mcli.RunConfig.from_file('$here/mpt-125m-r2.yaml')"
fi
serve
bucket dataset 2048

# play FILE KEY RUN FLAG…: starts what the file says under KEY, as its platform does, with TRAIN for this machine.
play() {
    local text
    mkdir "$folder/$3"
    text=$("$PYTHON" - "$1" "$2" <<'PROGRAM'
import sys

import yaml

file = yaml.safe_load(open(sys.argv[1]))
print(file[sys.argv[2]].replace("/fusecache/examples", "examples"))
PROGRAM
    )
    TRAIN=$(training /data "$3" "${@:4}") BUCKET=s3://$BUCKET CACHE_DIR=$folder/cache WARM=dataset \
        bash -euc "$text" </dev/null >"$folder/$3/out" 2>&1 &
    job=$!
}
# shellcheck disable=SC2317 # wait_for calls it
saved_or_over() { in_bucket "$1" || { ! kill -0 "$job" 2>/dev/null && fail "the job has ended"; }; }

for what in "skypilot.yaml run" "mpt-125m-r2.yaml command"; do
    read -r file key <<<"$what"
    play $here/"$file" "$key" "$key-whole" --global-batch-size 256
    status=0
    wait "$job" || status=$?
    check "$file: exit status 0" [ "$status" = 0 ]
    check "$file: final.pt is in the bucket" in_bucket "$key-whole/final.pt"

    play $here/"$file" "$key" "$key-stopped" --global-batch-size 1 --context 1024 --checkpoint-every 5
    wait_for 240 "the first checkpoint" saved_or_over "$key-stopped/step-0005/.metadata"
    began=$SECONDS
    kill -TERM "$job"
    status=0
    wait "$job" || status=$?
    check "$file: over $((SECONDS - began)) s after SIGTERM, exit status $status" [ "$status" != 0 ]
    check "$file: all that was saved is in the bucket" checkpoints_are_there "$folder/$key-stopped"
    check "$file: no mount is left" not_mounted /data
done
not_here "the platforms themselves, GPUs, and llm-foundry: TRAIN of the files, and their other set-up, were not run"
