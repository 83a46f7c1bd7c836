# Makes a machine of namespaces (../boot.sh) what a cloud's image makes of one: a user `ubuntu` who may log in with a key,
# an ssh server, and the packages that the project locks, so that nothing has to be fetched. The project itself is there
# in no version: whoever wants it brings it.
# $1: the public key, $2: a virtual environment with the packages, $3: a directory for the cloud's own Python module,
# $4: the memory that the machine says it has, in GiB, $5: kernels of the CPU that have been compiled here, if any
set -eu
sed -E "s/^(MemTotal|MemFree|MemAvailable):.*/\\1: $(($4 * 1048576)) kB/" /proc/meminfo > /mnt/meminfo
mount --bind /mnt/meminfo /proc/meminfo
chmod 711 /root  # a Python may lie below
rm -rf /etc/pip.conf /etc/xdg/pip
userdel "$(id -un 1000)" 2>/dev/null || true
useradd --uid 1000 --create-home --home-dir /home/ubuntu --shell /bin/bash --password '*' ubuntu
install -d -m 700 -o ubuntu /home/ubuntu/.ssh
printf '%s\n' "$1" > /home/ubuntu/.ssh/authorized_keys
chown ubuntu /home/ubuntu/.ssh/authorized_keys
if [ -d "$5" ]; then
  install -d -m 700 -o ubuntu /home/ubuntu/.serve_app
  cp -r "$5" /home/ubuntu/.serve_app/kernels
  chown -R ubuntu /home/ubuntu/.serve_app
fi

# The packages, at the place where the project will have them.
venv=/home/ubuntu/serve-app/.venv
install -d -o ubuntu /home/ubuntu/serve-app "$venv" /mnt/venv
mount -t tmpfs tmpfs /mnt/venv
mkdir /mnt/venv/upper /mnt/venv/work
mount -t overlay venv -o "lowerdir=$2,upperdir=/mnt/venv/upper,workdir=/mnt/venv/work" "$venv"
packages=$(echo "$venv"/lib/python3*/site-packages)
rm -rf "$venv"/.*-installed "$packages"/*serve_app* "$venv"/bin/serve-app
grep -lIr "^#!$2/bin/" "$venv/bin" | xargs sed -i "1s|^#!$2/bin/|#!$venv/bin/|"
chown ubuntu "$venv" "$venv/bin" "$packages"

ssh-keygen -A > /dev/null
mkdir -p /run/sshd
rm -f /etc/ssh/sshd_config.d/*
cat > /etc/ssh/sshd_config <<END
AuthorizedKeysFile .ssh/authorized_keys
PasswordAuthentication no
UsePAM no
KbdInteractiveAuthentication no
UseDNS no
AcceptEnv LANG
SetEnv PYTHONPATH=$3
Subsystem sftp internal-sftp
END
/usr/sbin/sshd
