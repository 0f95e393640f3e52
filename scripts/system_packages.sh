#!/bin/sh
# Installs those of the named Debian packages that are missing; quick and silent when none is.
#
#   PYTHON=python3.11 system_packages.sh fuse3 python3-dev
#
# Where dnf installs (Fedora, Rocky, Amazon Linux), it takes their counterparts. PYTHON: as make was told.
set -eu

if command -v dpkg-query >/dev/null; then
    is_there() { [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
    named() { case $1 in rpm-build) echo rpm ;; *) echo "$1" ;; esac; }
    steps='apt-get|-q|update apt-get|-q|install|--yes|--no-install-recommends'
elif command -v dnf >/dev/null; then
    python=$(basename "${PYTHON:-python3}")
    is_there() { rpm --quiet -q --whatprovides "$1"; }
    named() {
        case $1 in
            libc6-dev) echo glibc-devel ;;
            libfuse3-dev) echo fuse3-devel ;;
            pkg-config) echo pkgconf-pkg-config ;;
            python3) echo "$python" ;;
            python3-dev) echo "$python-devel" ;;
            python3-venv) ;; # a part of python3 there
            *) echo "$1" ;;
        esac
    }
    steps='dnf|-q|-y|--setopt=install_weak_deps=False|install'
else
    echo "There is neither apt nor dnf. Install your system's counterparts of: $*" >&2
    echo "and run make with APT= (empty), so that it does not look for them." >&2
    exit 1
fi
missing=
for package; do
    for name in $(named "$package"); do
        is_there "$name" || missing="$missing $name"
    done
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" -ne 0 ]; then
    as_root=sudo
    command -v sudo >/dev/null || { echo "Run as root: ${steps%%|*} install$missing" >&2; exit 1; }
fi
echo "system packages:$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for step in $steps; do
    case $step in *install*) names=$missing ;; *) names= ;; esac
    # shellcheck disable=SC2086,SC2046 # words on purpose
    if ! $as_root env DEBIAN_FRONTEND=noninteractive $(echo "$step" | tr '|' ' ') $names >"$log" 2>&1 </dev/null; then
        cat "$log" >&2
        exit 1
    fi
done
