#!/bin/bash
# job.sh ROOT COMMAND…: runs a job in a container of systemd-nspawn, with the bucket at /data. As root.
#
# ROOT is a system with fusecache, as debootstrap makes it; it stays as it is. BUCKET, S3_ENDPOINT_URL and the AWS_* keys
# come from the environment, CACHE is a folder of this machine [/var/cache/fusecache-job]. SIGTERM reaches COMMAND, which
# saves; 25 s later all that it closed is uploaded, or is named. The exit status is that of `fusecache run`.
set -euo pipefail
root=$1
shift
CACHE=${CACHE:-/var/cache/fusecache-job}
mkdir -p "$CACHE"
read -ra more <<<"${NSPAWN_OPTIONS:-}"
for name in S3_ENDPOINT_URL AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY; do
    [ -z "${!name:-}" ] || more+=("--setenv=$name")
done
# Without --kill-signal, SIGTERM to nspawn kills everything in the container at once.
exec systemd-nspawn --quiet --directory="$root" --volatile=overlay --register=no --keep-unit --console=pipe --hostname=localhost \
    --kill-signal=SIGTERM --bind=/dev/fuse --bind="$CACHE:/cache" "${more[@]}" \
    fusecache run --mount "$BUCKET" /data --cache-dir /cache --sync-deadline 25s -- "$@"
