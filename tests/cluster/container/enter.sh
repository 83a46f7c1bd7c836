# Runs a program in a root of its own, as the first process of namespaces that `unshare` has made.
# $1: the root's folder, $2: an empty folder, $3: ro or rw, then mounts as SOURCE TARGET ro|rw, then --, then the program
set -eu
mount --make-rprivate /
from=$1 root=$2 mode=$3
shift 3
mount --bind "$from" "$root"
while [ "$1" != -- ]; do
  [ -d "$1" ] && mkdir -p "$root$2" || { mkdir -p "$(dirname "$root$2")"; : >> "$root$2"; }
  mount --bind "$1" "$root$2"
  [ "$3" = rw ] || mount -o remount,bind,ro "$root$2"
  shift 3
done
shift
cd "$root"
mkdir -p proc dev sys
mount -t proc -o nosuid,nodev,noexec proc proc
mount -t sysfs -o ro,nosuid,nodev,noexec sys sys 2>/dev/null || mount --rbind /sys sys
# What a container has of devices: nothing of this machine's own. /dev/shm may be a volume.
mkdir "$root/../dev"
mount -t tmpfs -o mode=755,nosuid devices "$root/../dev"
for name in null zero full random urandom tty; do
  : > "$root/../dev/$name"
  mount --bind "/dev/$name" "$root/../dev/$name"
done
ln -s /proc/self/fd "$root/../dev/fd"
ln -s /proc/self/fd/1 "$root/../dev/stdout"
ln -s /proc/self/fd/2 "$root/../dev/stderr"
mkdir "$root/../dev/shm" "$root/../dev/pts"
mount --rbind "$root/dev/shm" "$root/../dev/shm" 2>/dev/null || :
mount --rbind "$root/../dev" dev
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 terminals dev/pts
ln -s pts/ptmx dev/ptmx
[ "$mode" = rw ] || mount -o remount,bind,ro "$root"
pivot_root . .
umount -l .
cd "${WORKDIR:-/}"
exec "$@"
