#!/bin/bash
# Slurm's Prolog: root runs it on every node before a job. The first job of a node mounts the bucket, the others share
# that mount. If this fails, Slurm drains the node and puts the job back into the queue.
set -euo pipefail
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CONFIG=/etc/fusecache/slurm.toml
MOUNT=/data
# What the daemon fetches ahead for every job, while the job starts: names below the mount.
WARM=(dataset)
JOBS=/run/fusecache-slurm/jobs

mkdir -p "$JOBS" "$MOUNT"
exec 9>"$JOBS/../lock"
flock 9
# One file for each job that uses the mount. Those of jobs that ended while the node was down went with /run.
touch "$JOBS/$SLURM_JOB_ID"
# 9>&-: the daemon would inherit the lock, and hold it as long as it lives.
fusecache unmount --if-dead "$MOUNT" 9>&-
mountpoint --quiet "$MOUNT" || fusecache mount --config "$CONFIG" 9>&-
for name in "${WARM[@]}"; do
    fusecache warm "$MOUNT/$name" 9>&- || echo "job $SLURM_JOB_ID: $MOUNT/$name is not warmed" >&2
done
