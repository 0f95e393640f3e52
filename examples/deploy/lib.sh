# shellcheck shell=bash
# What the try.sh of each folder share: an S3 server of their own, a dataset in its bucket, and lines `ok …` for what
# held. `NOT HERE …` names what this machine cannot show. Sourced after `set -euo pipefail`.

# shellcheck disable=SC2164
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHON=${PYTHON:-$PWD/.venv/bin/python} BUCKET=deploy-example
export AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_ENDPOINT_URL
export TQDM_DISABLE=1
folder=$(mktemp -d /tmp/deploy.XXXXXX)
chmod 755 "$folder"
export FACTS=$folder/facts
endings=()

# at_end COMMAND: what to do at the end of the script, the last one first.
at_end() { endings=("$1" "${endings[@]}"); }
finish() {
    local status=$? ending
    [ "$status" = 0 ] || tail -n 60 "$folder"/*.log "$folder"/*/out >&2 || true
    for ending in "${endings[@]}"; do eval "$ending" || true; done
    rm -rf "$folder"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

ok() { echo "ok      $*"; }
fail() { echo "FAILED  $*" >&2; exit 1; }
not_here() { echo "NOT HERE $*"; }
# check PROMISE COMMAND…: the command must succeed.
check() { local promise=$1; shift; if "$@"; then ok "$promise"; else fail "$promise: $*"; fi; }
# wait_for SECONDS WHAT COMMAND…: until the command succeeds.
wait_for() {
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do [ "$SECONDS" -lt "$end" ] || fail "not within its time: $what"; sleep 0.2; done
}

# Starts the tests' S3 server with an empty bucket.
serve() {
    "$PYTHON" -m tests.s3server --directory "$folder/bucket" --bucket "$BUCKET" --access-key key --secret-key secret \
        --with-control >"$FACTS" &
    at_end "kill $! && wait $!"
    wait_for 60 "the S3 server" test -s "$FACTS"
    AWS_ENDPOINT_URL=$("$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["endpoint_url"])' <"$FACTS")
}

# The bucket as another client sees it, without any mount.
bucket() { "$PYTHON" -m examples.deploy.bucket "$@"; }
in_bucket() { bucket keys | grep -qxF "$1"; }
# checkpoints_are_there LOG_FOLDER: each checkpoint that a trainer's log names is whole in the bucket.
checkpoints_are_there() { bucket checkpoints "$1"; }
# not_mounted FOLDER: neither there nor below it.
not_mounted() { ! grep fusecache /proc/self/mountinfo | grep -qF " $1"; }

# training POINT RUN FLAG…: a command that trains on the dataset below POINT, with checkpoints and final.pt below
# POINT/RUN, and its step log in $folder/RUN.
training() {
    echo "env --chdir=$PWD HOME=/tmp PYTHONPATH=$PWD $PYTHON -m torch.distributed.run --standalone -m examples.demo.train" \
        "--data $1/dataset --checkpoints $1/$2 --final $1/$2/final.pt --log-dir $folder/$2 ${*:3}"
}

# Podman with a storage of its own, and an image of TREE in it: its name is IMAGE.
use_podman() {
    export CONTAINERS_STORAGE_CONF=$folder/storage.conf IMAGE=localhost/fusecache-try
    printf '[storage]\ndriver = "overlay"\ngraphroot = "%s"\nrunroot = "%s"\n' \
        "$folder/storage" "$folder/podman" >"$CONTAINERS_STORAGE_CONF"
    # Podman's own limits are more than a machine may allow that is a container itself.
    export CONTAINERS_CONF=$folder/containers.conf
    printf '[containers]\ndefault_ulimits = ["nofile=%s:%s", "nproc=1000:1000"]\n[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\n' \
        "$(ulimit -Hn)" "$(ulimit -Hn)" >"$CONTAINERS_CONF"
    printf 'events_logger = "file"\n[network]\nnetwork_backend = "netavark"\n' >>"$CONTAINERS_CONF"
    at_end "podman rm --all --force --time 1; podman rmi --all --force; umount $folder/storage/overlay"
    tar --directory="${TREE:?a system with fusecache}" --one-file-system --create . |
        podman import --quiet --change "WORKDIR=/" - "$IMAGE" >/dev/null
}
# What a container needs of this machine to train: its interpreter, this checkout, and the place of the step logs. Their
# paths, one a line.
trainer_paths() {
    local prefix
    prefix=$("$PYTHON" -c 'import sys; print(sys.base_prefix)')
    printf '%s\n' "$PWD" "$(readlink -f "${PYTHON%/bin/*}")" "$folder" "$prefix" | grep -vx /usr
}
# The same for a compose file.
trainer_volumes() { trainer_paths | sed 's/.*/"&:&", /' | tr -d '\n'; }
trainer_binds() { trainer_paths | sed 's/^/--bind=/' | tr '\n' ' '; }
