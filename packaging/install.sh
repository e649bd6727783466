#!/bin/sh
# Installs the daemon: its own environment, its commands, its units and an example of its settings. `make install` runs
# this with its variables. Nothing is enabled or started, and no user is made: what does that is said at the end.
set -eu

: "${DESTDIR=}" "${prefix:=/usr/local}" "${sysconfdir:=/etc}" "${unitprefix:=$prefix/lib}" "${PYTHON:=python3}"
: "${EXTRAS:=cuda,metrics}" "${PIP_FLAGS=}"

source=$(cd "$(dirname "$0")/.." && pwd)
home=$prefix/lib/kvd
case $prefix$sysconfdir$unitprefix in /*) ;; *) echo "prefix must be absolute: $prefix" >&2; exit 64 ;; esac

# The environment. It is made where it is staged, then told where it will be.
rm -rf "$DESTDIR$home"
mkdir -p "$DESTDIR$home"
"$PYTHON" -m venv "$DESTDIR$home"
# shellcheck disable=SC2086  # flags are words
"$DESTDIR$home/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile $PIP_FLAGS "$source[$EXTRAS]"
"$DESTDIR$home/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes setuptools pip
find "$DESTDIR$home/lib" -name direct_url.json -delete
for file in "$DESTDIR$home"/bin/*; do
    case ${file##*/} in
    python*) ;;
    kvd | kvd-stat) sed -i "1s|^#!.*|#!$home/bin/python|" "$file" ;;
    *) rm "$file" ;;
    esac
done
sed -i "/^command = /d" "$DESTDIR$home/pyvenv.cfg"
"$DESTDIR$home/bin/python" -m compileall -q -s "$DESTDIR" "$DESTDIR$home/lib"

mkdir -p "$DESTDIR$prefix/bin"
ln -sf "$home/bin/kvd" "$home/bin/kvd-stat" "$DESTDIR$prefix/bin/"

# Manual pages. That of a worker, which lives elsewhere, needs torch to be made: it is here after `make man`.
man=$DESTDIR$prefix/share/man
"$DESTDIR$home/bin/python" -m kvd.manual "$man" kvd.cli:parser kvd.commands.stat:parser
if [ -e "$source/build/man/man1/kvd-worker.1" ]; then
    cp "$source/build/man/man1/kvd-worker.1" "$man/man1/"
fi
gzip -9nf "$man"/man1/kvd*.1 "$man/man5/kvd.toml.5"

# Units, with the paths of this prefix.
put() { # FOLDER FILE...
    folder=$DESTDIR$1
    shift
    mkdir -p "$folder"
    for file; do
        sed "s|/usr/bin/kvd|$prefix/bin/kvd|g; s|/usr/share/|$prefix/share/|g; s|/etc/kvd|$sysconfdir/kvd|g" \
            "$source/$file" >"$folder/${file##*/}"
        chmod 0644 "$folder/${file##*/}"
    done
}
put "$unitprefix/systemd/system" systemd/kvd.service systemd/kvd-worker@.service systemd/run-kvdshm.mount
put "$unitprefix/sysusers.d" systemd/sysusers.d/kvd.conf
put "$unitprefix/tmpfiles.d" systemd/tmpfiles.d/kvd.conf
put "$prefix/share/kvd/sysctl.d" systemd/sysctl.d/90-kvd.conf
put "$prefix/share/kvd" systemd/kvd.toml
put "$prefix/share/doc/kvd" README.md CHANGELOG.md LICENSE docs/*.md

# Settings that are there already are the administrator's.
mkdir -p "$DESTDIR$sysconfdir/kvd/kvd.d"
if [ ! -e "$DESTDIR$sysconfdir/kvd/kvd.toml" ]; then
    put "$sysconfdir/kvd" systemd/kvd.toml
fi

if [ -z "$DESTDIR" ]; then
    echo "installed. What follows: systemd-sysusers && systemd-tmpfiles --create kvd.conf && systemctl daemon-reload"
    echo "then, with $sysconfdir/kvd/kvd.toml as it should be: kvd doctor && systemctl enable --now kvd"
fi
