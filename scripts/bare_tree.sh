# shellcheck shell=bash
# Bare Debian trees below build/, and commands in them. Sourced by tests/systemd/run and tests/container/run, in the
# root of the checkout, after `set -euo pipefail`.
#
#   DISTRIBUTION=bookworm   what debootstrap installs; for Ubuntu's, set MIRROR and COMPONENTS=main,universe too
#   MIRROR=http://…         another Debian mirror
#   FUSE_DEVICE=/…          what is /dev/fuse in a tree
#
# debootstrap runs once for each distribution. Every user of a tree works in a copy of the result.

DISTRIBUTION=${DISTRIBUTION:-bookworm}
DEBIAN_MIRROR=http://deb.debian.org/debian
MIRROR=${MIRROR:-$DEBIAN_MIRROR}
COMPONENTS=${COMPONENTS:-main}
# No Python, no FUSE, no compiler: the project's own make targets must bring what they need.
BARE_PACKAGES=systemd,systemd-sysv,dbus,make,ca-certificates

need_root() { # name-of-the-script
    [ "$(id -u)" -eq 0 ] || { echo "$1 needs root: it builds and starts a machine" >&2; exit 1; }
}

lock_folder() { # folder name-of-the-script: held until this process ends
    mkdir -p "$1"
    exec 9>"$1/lock"
    flock --nonblock 9 || { echo "another $2 is using $1" >&2; exit 1; }
}

timed() { # what command…
    local began=$SECONDS
    echo "-- $1"; shift
    "$@" 9>&- || { echo "   failed after $((SECONDS - began)) s" >&2; return 1; }
    echo "   $((SECONDS - began)) s"
}

logged() { # log command…: quiet unless it fails
    local log=$1; shift
    "$@" >"$log" 2>&1 </dev/null || { tail -n 50 "$log" >&2; return 1; }
}

make_tree() { # root: the bare system there, unless it is there already
    local root=$1 base=$PWD/build/bare/$DISTRIBUTION kind="$DISTRIBUTION $MIRROR $COMPONENTS $BARE_PACKAGES"
    [ "$(cat "$root.complete" 2>/dev/null)" != "$kind" ] || return 0
    mkdir -p "$base" "$(dirname "$root")" && rm -rf "$root.complete" "$root" || return 1
    (
        flock 8 &&
            { [ "$(cat "$base/root.complete" 2>/dev/null)" = "$kind" ] || bootstrap "$base" "$kind"; } &&
            cp --archive --one-file-system --reflink=auto "$base/root" "$root"
    ) 8>"$base/lock" &&
        echo "$kind" >"$root.complete"
}

bootstrap() { # base kind
    local base=$1 kind=$2 script=()
    # debootstrap has one script for all of Ubuntu, but knows only the names that are older than itself.
    if [ ! -e "/usr/share/debootstrap/scripts/$DISTRIBUTION" ]; then
        [ "$MIRROR" != "$DEBIAN_MIRROR" ] ||
            { echo "no Debian has the name $DISTRIBUTION; for Ubuntu's, set MIRROR and COMPONENTS=main,universe" >&2; return 1; }
        script=(gutsy)
    fi
    rm -rf "$base/root.complete" "$base/root"
    # debootstrap has a variable of this name too, with another meaning.
    logged "$base/debootstrap.log" env --unset=COMPONENTS debootstrap --variant=minbase --include="$BARE_PACKAGES" \
        --components="$COMPONENTS" "$DISTRIBUTION" "$base/root" "$MIRROR" "${script[@]}" &&
        # debootstrap says nothing if its /proc is in use when it unmounts that. A copy of it would fill the disk.
        { ! mountpoint --quiet "$base/root/proc" || umount --lazy "$base/root/proc"; } &&
        echo "$kind" >"$base/root.complete"
}

# pip's settings of this machine, for a pip in the tree. Sets pip_options: every setting as a variable, and every
# existing file or folder that a setting names, read-only at the same path.
read_pip_settings() {
    local pip name key value word
    pip_options=()
    for name in ${!PIP_*}; do pip_options+=("--setenv=$name=${!name}"); done
    for pip in "$PWD/.venv/bin/python" python3; do
        "$pip" -m pip --version >/dev/null 2>&1 && break || pip=
    done
    [ -n "$pip" ] || return 0
    local -A bound=()
    while IFS='=' read -r key value; do
        # `pip config list` quotes values as Python does: global.find-links='/one\n/two'.
        value=${value#[\'\"]} value=${value%[\'\"]} value=${value//\\n/ }
        name=${key##*.}; name=PIP_${name//-/_}
        [ -n "$value" ] || continue
        case $key in :env:.*) ;; *) name=${name^^}; [ -n "${!name:-}" ] || pip_options+=("--setenv=$name=$value") ;; esac
        for word in $value; do
            # The pages of an index in a folder refer to files beside that folder.
            case $word in file://*) word=${word#file://}; word=$(dirname "${word%/}") ;; esac
            case $word in /?*) [ ! -e "$word" ] || bound[$word]=1 ;; esac
        done
    done < <("$pip" -m pip config list 2>/dev/null)
    for word in "${!bound[@]}"; do pip_options+=("--bind-ro=$word"); done
}

inside() { # root command…: in the tree, not booted, with this machine's network and pip settings
    local root=$1 options=() name
    shift
    for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
        [ -z "${!name:-}" ] || options+=("--setenv=$name=${!name}")
    done
    # pip.conf, because its settings cannot be asked for on a machine without pip.
    for name in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
        [ ! -e "$name" ] || options+=("--bind-ro=$name")
    done
    [ ! -e /dev/fuse ] || options+=(--bind="${FUSE_DEVICE:-/dev/fuse}:/dev/fuse")
    read_pip_settings
    systemd-nspawn --quiet --directory="$root" --register=no --keep-unit --pipe --as-pid2 \
        --resolv-conf=replace-host "${options[@]}" "${pip_options[@]}" --setenv=DEBIAN_FRONTEND=noninteractive "$@"
}
