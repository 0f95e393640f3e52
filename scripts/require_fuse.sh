#!/bin/sh
# Stops with an explanation when the kernel offers no /dev/fuse.
[ -e /dev/fuse ] && exit 0
[ "$(id -u)" -ne 0 ] || modprobe fuse 2>/dev/null || true
[ -e /dev/fuse ] && exit 0
cat >&2 <<'END'
There is no /dev/fuse here, and without it nothing can be mounted.

  In Docker:   start the container with  --device /dev/fuse --cap-add SYS_ADMIN
               (and, where AppArmor is on,  --security-opt apparmor=unconfined)
  Kubernetes:  a privileged container, or a device plugin that offers /dev/fuse
  In a VM or on a bare machine:  sudo modprobe fuse
END
exit 1
