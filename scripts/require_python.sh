#!/bin/sh
# Stops with an explanation if a Python is too old. One that is not there yet may come with the system's packages.
# usage: require_python.sh PYTHON [TARGET OF MAKE]
command -v "$1" >/dev/null || exit 0
version=$("$1" -c 'import sys; print(".".join(map(str, sys.version_info[:3])))')
"$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && exit 0
cat >&2 <<END
$1 is Python $version, and fusecache needs Python 3.11 or newer. Nothing was changed. Name another one:

  make ${2:-install} PYTHON=python3.12

On Ubuntu 22.04:  sudo apt-get install python3.11 python3.11-venv python3.11-dev
On Rocky 9 and Amazon Linux 2023 that command installs python3.11 by itself, if you name it.
END
exit 1
