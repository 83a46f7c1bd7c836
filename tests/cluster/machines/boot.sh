# The first process of a machine that test code makes (network.py): its disk is this machine's with all that it writes
# in memory, its /tmp and its shared memory are its own. When this process ends, the kernel ends all others there.
# $1: an empty directory, $2: the machine's name, $3: size of its shared memory, $4: its address
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 disk "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay machine -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount --rbind /sys sys
mount --bind /dev dev
mount -t tmpfs -o "mode=1777,size=$3" memory dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 terminals dev/pts
mount -t tmpfs -o mode=1777 tmp tmp
mount -t tmpfs -o mode=755 run run
mkdir -p mnt
pivot_root . mnt
umount -l /mnt
hostname "$2"
# Names are asked of nobody: a resolver that is away costs every program many seconds.
: > /etc/resolv.conf
printf '127.0.0.1 localhost\n%s %s\n' "$4" "$2" > /etc/hosts
ip link set lo up
echo up
trap : TERM INT HUP
# bash ends the zombies that come to it.
while :; do sleep 3600 & wait; done
