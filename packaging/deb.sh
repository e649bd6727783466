#!/bin/sh
# Makes dist/kvd_VERSION_ARCH.deb of what `make install prefix=/usr` installs. `make deb` runs this with its variables.
set -eu

: "${PYTHON:=python3}" "${OUTPUT:=dist}"
source=$(cd "$(dirname "$0")/.." && pwd)
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$source/kvd/__init__.py")
architecture=$(dpkg --print-architecture)
# The environment belongs to one minor version of Python.
python=$("$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
chmod 0755 "$stage"
DESTDIR=$stage prefix=/usr sysconfdir=/etc unitprefix=/usr/lib sh "$source/packaging/install.sh"

mkdir "$stage/DEBIAN"
cat >"$stage/DEBIAN/control" <<CONTROL
Package: kvd
Version: $version
Architecture: $architecture
Maintainer: kvd maintainers <kvd@localhost>
Section: utils
Priority: optional
Installed-Size: $(du -ks "$stage/usr" | cut -f1)
Depends: $python, systemd (>= 247)
Suggests: nvidia-persistenced
Description: per-node memory tier for the KV history of long conversations
 The daemon owns host RAM and VRAM in which workers keep the history of long
 conversations, so that a GPU can decode with more of it than it has memory.
CONTROL
echo /etc/kvd/kvd.toml >"$stage/DEBIAN/conffiles"
install -m 0755 "$source"/packaging/debian/* "$stage/DEBIAN/"

mkdir -p "$OUTPUT"
dpkg-deb --root-owner-group -Zgzip -z1 --build "$stage" "$OUTPUT/kvd_${version}_$architecture.deb"
