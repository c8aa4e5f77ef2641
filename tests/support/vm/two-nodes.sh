#!/bin/bash
# A virtual machine with two NUMA nodes, Debian userland, systemd as init, under QEMU's software emulation.
#   two-nodes.sh build DIR [DEBIAN_PACKAGE ...]   makes DIR/{vmlinuz,root.ext4}; needs root; once: a few minutes
#   two-nodes.sh run DIR [HOST_PORT:GUEST_PORT ...]   boots it; the console is this terminal; power off inside to leave
# Put what should run inside into DIR/overlay before building: it is copied over the root file system. A file
# overlay/etc/systemd/system/multi-user.target.wants/NAME.service starts NAME at boot. root has no password.
# With VM_DRIVE=snapshot=on nothing that happens inside is kept.
# $VM_TAR is a file that the machine sees as /dev/nvme1n1, $VM_APPEND goes to the kernel's command line.
# Needs from Debian: mmdebstrap, qemu-system-x86, e2fsprogs. The cloud kernel has NUMA, ext4 and NVMe built in, so
# it boots without an initramfs; its other drivers (virtio_net) are modules in the image. QEMU 7.2 emulates AVX2.
set -euo pipefail
command=$1 dir=$2; shift 2
case $command in
build)
  mkdir -p "$dir/overlay"
  rm -rf "$dir/root"
  packages=systemd-sysv,udev,dbus,kmod,iproute2,numactl,procps,python3,linux-image-cloud-amd64
  for p in "$@"; do packages+=,$p; done
  mmdebstrap --mode=root --variant=minbase --include="$packages" bookworm "$dir/root"
  cp "$dir"/root/boot/vmlinuz-*-cloud-amd64 "$dir/vmlinuz"
  cp -a "$dir/overlay/." "$dir/root/"
  chroot "$dir/root" passwd -d root >/dev/null
  echo virtio_net >"$dir/root/etc/modules-load.d/net.conf"
  mkdir -p "$dir/root/etc/systemd/network"
  printf '[Match]\nType=ether\n[Network]\nDHCP=yes\n' >"$dir/root/etc/systemd/network/all.network"
  chroot "$dir/root" systemctl enable systemd-networkd serial-getty@ttyS0 >/dev/null 2>&1
  rm -f "$dir/root.ext4"
  truncate -s "${VM_DISK:-6G}" "$dir/root.ext4"
  mke2fs -q -t ext4 -d "$dir/root" "$dir/root.ext4"
  rm -rf "$dir/root"
  ;;
run)
  forward=
  for ports in "$@"; do forward+=",hostfwd=tcp:127.0.0.1:${ports%%:*}-:${ports##*:}"; done
  exec qemu-system-x86_64 -accel tcg,thread=multi -cpu max -m 4G -smp 4,sockets=2,cores=2 \
    -object memory-backend-ram,id=m0,size=2G -object memory-backend-ram,id=m1,size=2G \
    -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1 -numa dist,src=0,dst=1,val=21 \
    -drive file="$dir/root.ext4",if=none,id=d,format=raw,${VM_DRIVE:-snapshot=off} -device nvme,drive=d,serial=root \
    ${VM_TAR:+-drive file=$VM_TAR,if=none,id=t,format=raw -device nvme,drive=t,serial=tar} \
    -netdev user,id=n"$forward" -device virtio-net-pci,netdev=n,romfile= \
    -kernel "$dir/vmlinuz" -append "root=/dev/nvme0n1 rw console=ttyS0 quiet panic=-1 numa_balancing=disable ${VM_APPEND:-}" \
    -nographic -no-reboot
  ;;
*) echo "two-nodes.sh build|run DIR …" >&2; exit 2 ;;
esac
