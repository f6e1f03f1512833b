#!/bin/bash
# Boots a throw-away systemd as PID 1 over a copy-on-write view of this machine's root directory.
# Called by machine.py, as root, in new mount, pid, uts, ipc, cgroup and network namespaces:
#
#   boot.sh WORK TARGET
#
# WORK/seed         files laid over the root directory
# WORK/binds        lines "SOURCE TARGET": directories shown read-only inside
# WORK/ready.sock   gets systemd's READY=1 when TARGET is reached
set -euo pipefail
work=$1 target=$2 root=$1/root

mount --make-rprivate /

# The root directory: what is written goes to memory and ends with the mount namespace.
mkdir -p "$work/memory" "$root"
mount -t tmpfs tmpfs "$work/memory"
mkdir "$work/memory/upper" "$work/memory/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/memory/upper,workdir=$work/memory/work" "$root"
cp -a "$work/seed/." "$root"
while read -r source inside; do
    mkdir -p "$root$inside"
    mount --bind "$source" "$root$inside"
    mount -o remount,bind,ro "$root$inside"
done <"$work/binds"

# What the kernel shows: our processes and our control groups, everything else read-only.
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount --rbind /sys "$root/sys"
umount -R "$root/sys/fs/cgroup" 2>/dev/null || true
mount -o remount,bind,ro "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"

# Devices, with a /dev/shm as small as a container's.
mount -t tmpfs tmpfs "$root/dev"
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/dev/shm"
mount -t devpts devpts "$root/dev/pts" -o newinstance,ptmxmode=0666
ln -s pts/ptmx "$root/dev/ptmx"
while read -r name major minor; do
    mknod -m 666 "$root/dev/$name" c "$major" "$minor"
done <<'DEVICES'
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
DEVICES
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
touch "$root/dev/console"
mount --bind /dev/null "$root/dev/console"

mount -t tmpfs -o mode=755 tmpfs "$root/run"
touch "$root/run/machine-ready.sock"
mount --bind "$work/ready.sock" "$root/run/machine-ready.sock"

# Units that want hardware, a console, or the network.
for unit in \
    systemd-udevd.service systemd-udev-trigger.service systemd-udevd-control.socket systemd-udevd-kernel.socket \
    systemd-modules-load.service systemd-sysctl.service systemd-random-seed.service systemd-timesyncd.service \
    systemd-networkd.service systemd-resolved.service systemd-update-utmp.service systemd-binfmt.service \
    proc-sys-fs-binfmt_misc.automount systemd-remount-fs.service systemd-tmpfiles-setup-dev.service \
    systemd-tmpfiles-setup.service dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount \
    sys-kernel-tracing.mount systemd-logind.service systemd-journald-audit.socket \
    sockets.target timers.target paths.target; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done

exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=other NOTIFY_SOCKET=/run/machine-ready.sock \
    chroot "$root" /lib/systemd/systemd --system --unit="$target" --log-target=journal
