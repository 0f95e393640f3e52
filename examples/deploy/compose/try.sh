#!/bin/bash
# Both compose files by podman-compose: to the end of the training, and stopped in the middle. As root, with podman;
# TREE is a system with fusecache, of which the image is made.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
here=$PWD/examples/deploy/compose

# Mounts that begin here stay here, and pass to the containers.
[ -n "${FUSECACHE_TRY_NAMESPACE:-}" ] || FUSECACHE_TRY_NAMESPACE=1 exec unshare --mount --propagation slave bash "$here/try.sh"
use_podman
serve
bucket dataset 2048
export BUCKET=deploy-example MOUNT=$folder/mounts CACHE=$folder/cache FUSECACHE_IMAGE=$IMAGE TRAIN_IMAGE=$IMAGE
mkdir "$MOUNT" "$CACHE"
mount --bind "$MOUNT" "$MOUNT"
at_end "umount -l $MOUNT"
mount --make-shared "$MOUNT"
cat >"$folder/here.yaml" <<CONF
# The server listens on this machine's loopback; the trainer's interpreter and code are this machine's.
services:
  train:
    network_mode: host
    volumes: [$(trainer_volumes)]
CONF
cp "$folder/here.yaml" "$folder/both.yaml"
printf '  fusecache:\n    network_mode: host\n' >>"$folder/both.yaml"
# trains POINT RUN FLAG…: sets TRAIN to a command that trains below POINT/RUN.
trains() {
    mkdir -m 777 "$folder/$2"
    TRAIN="$(training "$1" "$2" "${@:3}")"
    export TRAIN
}
compose() { "${PYTHON%/*}/podman-compose" --project-name try "$@" >>"$folder/compose.log" 2>&1; }
status_of() { podman inspect --format '{{.State.ExitCode}}' "$1"; }
has_ended() { [ "$(podman inspect --format '{{.State.Status}}' "$1")" = exited ]; }

both() { BUCKET=s3://$BUCKET compose --file "$here/compose.yaml" --file "$folder/both.yaml" "$@"; }
one() { BUCKET=s3://$BUCKET compose --file "$here/one.yaml" --file "$folder/here.yaml" "$@"; }
for way in both one; do
    point=/data
    [ "$way" = one ] || point=/mounts/data
    trains "$point" "$way" --global-batch-size 256
    "$way" up --detach
    at_end "$way down --timeout 30"
    wait_for 240 "the end of the training" has_ended try_train_1
    check "$way: exit status 0" [ "$(status_of try_train_1)" = 0 ]
    check "$way: final.pt is in the bucket" in_bucket "$way/final.pt"
    "$way" down
    check "$way: no mount is left" not_mounted "$MOUNT"

    trains "$point" "$way-stopped" --global-batch-size 1 --context 1024 --checkpoint-every 5
    "$way" up --detach
    wait_for 240 "the first checkpoint" in_bucket "$way-stopped/step-0005/.metadata"
    began=$SECONDS
    podman stop --time 35 try_train_1 >/dev/null
    ok "$way: stopped after $((SECONDS - began)) s, exit status $(status_of try_train_1)"
    check "$way: all that was saved is in the bucket" checkpoints_are_there "$folder/$way-stopped"
    "$way" down
    check "$way: no mount is left" not_mounted "$MOUNT"
done
not_here "Docker's own engine and compose, AppArmor, and user namespaces of rootless containers"
