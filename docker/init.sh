#!/bin/busybox sh
# First program of a guest: enter the host's tree, which it sees below a layer in memory.
export PATH=/bin; /bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read m; do insmod /m/$m; done < /m/order
nine=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o $nine,cache=loose,ro host /ro && mount -t tmpfs rw /rw && mkdir /rw/upper /rw/aside &&
mount -t overlay -o lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/aside tree /tree || poweroff -f
cd /tree; mkdir -p proc sys dev run; for d in proc sys dev; do mount --move /$d $d; done
mount -t tmpfs run run; mkdir -p run/lab dev/pts dev/shm; mount -t 9p -o $nine lab run/lab
mount -t devpts pts dev/pts; mount -t tmpfs shm dev/shm; ln -s /proc/self/fd dev/fd
exec switch_root /tree /bin/bash /run/lab/start
