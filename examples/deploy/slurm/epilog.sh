#!/bin/bash
# Slurm's Epilog: root runs it on every node after a job, when its processes are gone. It uploads what the job wrote.
# The last job of a node unmounts. What the bucket lacks after SYNC_DEADLINE is named in LOG; then the mount stays, goes
# on uploading, and serves the next job.
set -euo pipefail
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
MOUNT=/data
SYNC_DEADLINE=25s
LOG=/var/log/fusecache-epilog.log
JOBS=/run/fusecache-slurm/jobs

exec 9>"$JOBS/../lock"
flock 9
rm -f "$JOBS/$SLURM_JOB_ID"
mountpoint --quiet "$MOUNT" || exit 0
# Not 1 if files are missing: a node in the state DRAIN would take no job, and no file would arrive the sooner.
ended() { fusecache "$@" --timeout "$SYNC_DEADLINE" 2>&1 9>&-; }
if [ -n "$(ls "$JOBS")" ]; then
    words=$(ended sync "$MOUNT") && exit 0
else
    words=$(ended unmount "$MOUNT") && exit 0
fi
echo "$(date --iso-8601=seconds) job $SLURM_JOB_ID: $words" >>"$LOG"
