#!/bin/bash
# Runs a script as a service of a systemd of its own, in namespaces over a copy-on-write view of this machine's root.
#   boot.sh OUT       runs OUT/proof.sh and returns once it has ended; it and its services see OUT as /out
# Needs root, systemd, overlayfs and a cgroup2 mount that may be written to. Nothing is emulated and nothing is written
# to this machine, apart from OUT; the network is this machine's.
set -eu
out=$(readlink -f "$1")
cgroups=$(findmnt -rno TARGET -t cgroup2 | head -n 1)
group=$cgroups/allspark-proof-$$
root=$(mktemp -d /tmp/allspark-proof-XXXXXX)
mkdir "$group"
trap 'rmdir "$root"; find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true' EXIT
export out root
(
echo 0 >"$group/cgroup.procs"       # this subshell
exec unshare --mount --pid --fork --uts --ipc --cgroup --kill-child bash -eu -c '
mount --make-rprivate /
mount -t tmpfs -o size=2g tmpfs "$root"
mkdir "$root/upper" "$root/work" "$root/root"
mount -t overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" overlay "$root/root"
cd "$root/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --bind /dev dev
for folder in run tmp dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
chmod 755 run root      # a Python of a virtual environment may be in root'"'"'s home
mkdir -p out
mount --bind "$out" out
# What concerns hardware, logins and this machine'"'"'s files.
for unit in systemd-udevd.service systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udev-trigger.service \
    systemd-tmpfiles-setup.service systemd-tmpfiles-setup-dev.service systemd-tmpfiles-clean.timer \
    systemd-sysctl.service systemd-modules-load.service systemd-remount-fs.service systemd-logind.service \
    systemd-networkd.service systemd-networkd-wait-online.service systemd-random-seed.service \
    systemd-update-utmp.service systemd-sysusers.service systemd-machine-id-commit.service systemd-pstore.service \
    kmod-static-nodes.service systemd-binfmt.service getty.target swap.target proc-sys-fs-binfmt_misc.automount \
    dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    sys-fs-fuse-connections.mount; do
  ln -sf /dev/null etc/systemd/system/$unit
done
: >etc/fstab
cat >etc/systemd/system/proof.service <<UNIT
[Service]
Type=oneshot
ExecStart=/bin/bash /out/proof.sh
StandardOutput=append:/out/log
StandardError=append:/out/log
ExecStopPost=/bin/systemctl --no-block exit
UNIT
printf "[Unit]\nRequires=basic.target\nAfter=basic.target\nWants=proof.service\n" >etc/systemd/system/proof.target
exec env -i container=proof PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot . /lib/systemd/systemd --system \
    --unit=proof.target --show-status=false
'
)
