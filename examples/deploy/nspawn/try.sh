#!/bin/bash
# A job in a container of systemd-nspawn: to the end of the training, and ended in the middle. As root; TREE is a system
# with fusecache.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

serve
bucket dataset 2048
export CACHE=$folder/cache
NSPAWN_OPTIONS="$(trainer_binds)"
export NSPAWN_OPTIONS
# job RUN FLAG…: starts a job in the background that trains below /data/RUN; its number is in `job`.
job() {
    local words
    mkdir "$folder/$1"
    read -ra words <<<"$(training /data "$@")"
    BUCKET=s3://$BUCKET examples/deploy/nspawn/job.sh "${TREE:?a system with fusecache}" "${words[@]}" \
        </dev/null >"$folder/$1/out" 2>&1 &
    job=$!
}
# shellcheck disable=SC2317 # wait_for calls it
saved_or_over() { in_bucket "$1" || { ! kill -0 "$job" 2>/dev/null && fail "the job has ended"; }; }

job whole --global-batch-size 256
status=0
wait "$job" || status=$?
check "exit status 0" [ "$status" = 0 ]
check "final.pt is in the bucket" in_bucket whole/final.pt

job stopped --global-batch-size 1 --context 1024 --checkpoint-every 5
wait_for 240 "the first checkpoint" saved_or_over stopped/step-0005/.metadata
began=$SECONDS
kill -TERM "$job"
status=0
wait "$job" || status=$?
took=$((SECONDS - began))
check "SIGTERM: over after $took s, exit status $status" [ "$status" != 0 ]
check "all that was saved is in the bucket" checkpoints_are_there "$folder/stopped"
check "no process is left" [ -z "$(pgrep --full "$folder")" ]
not_here "a container that systemd-machined registers, and --network-veth"
