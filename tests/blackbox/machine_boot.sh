# Boots systemd as pid 1 of fresh namespaces, on a copy-on-write view of this machine's root. Arguments: a folder for
# the view's parts, a folder that both sides see (in the machine: /mnt), and the checkout, which is seen at its own path
# wherever it lies. Exit status 75: not permitted here.
set -eu
parts=$1 shared=$2 checkout=$3
permitted() { "$@" || { echo "not permitted: $*" >&2; exit 75; }; }

permitted mount -t tmpfs -o mode=0755 tmpfs "$parts"
mkdir "$parts/upper" "$parts/work" "$parts/root"
root=$parts/root
permitted mount -t overlay -o "lowerdir=/,upperdir=$parts/upper,workdir=$parts/work" overlay "$root"
permitted mount -t proc proc "$root/proc"
permitted mount -t sysfs -o ro sysfs "$root/sys"
permitted mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
# Settings of the kernel are those of everybody: they can be read.
permitted mount --bind "$root/proc/sys" "$root/proc/sys"
permitted mount -o remount,bind,ro "$root/proc/sys"
# What systemd cleans at boot, and what is there already. Of /var a copy-on-write view is enough, but for its logs.
mount -t tmpfs -o mode=0755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=1777 tmpfs "$root/var/tmp"
mount -t tmpfs -o mode=0755 tmpfs "$root/var/log"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777,size=1g tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
touch "$parts/console" "$root/dev/console"
mount --bind "$parts/console" "$root/dev/console"
mount --bind "$shared" "$root/mnt"
[ -e "$root$checkout" ] || { mkdir -p "$root$checkout" && mount --bind "$checkout" "$root$checkout"; }
mkdir -p "$root/run/old"
cd "$root"
permitted pivot_root . run/old
umount -l /run/old
exec env -i PATH=/usr/sbin:/usr/bin container=kvd-test /lib/systemd/systemd --unit=basic.target --show-status=no
