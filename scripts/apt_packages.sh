#!/bin/sh
# Installs those of the named Debian or Ubuntu packages that are missing; quick and silent when none is.
set -eu

if ! command -v dpkg-query >/dev/null; then
    echo "This is neither Debian nor Ubuntu. Install your system's counterparts of: $*" >&2
    echo "and run make with APT= (empty), so that it does not look for them." >&2
    exit 1
fi
missing=
for package; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) || status=absent
    [ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "Run as root: apt-get install$missing" >&2; exit 1; }
    as_root=sudo
fi
echo "system packages:$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for command in update "install --yes --no-install-recommends$missing"; do
    # shellcheck disable=SC2086 # words on purpose
    if ! $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q $command >"$log" 2>&1 </dev/null; then
        cat "$log" >&2
        exit 1
    fi
done
