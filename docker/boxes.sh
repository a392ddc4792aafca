#!/bin/bash
# Run by `lab` outside, anew when $RECIPE changes (the lines that tell what apt and pip are to fetch): make ./made with what containers take where no registry can be
# reached. A tree of $SUITE with Docker in it; the base image, of the same suite, with the packages that the Dockerfile
# is going to ask for, so that its apt-get finds them there; and the wheels that pip is going to ask for.
set -euo pipefail
mkdir -p made/wheels; apt-config dump Acquire > acquire  # how this machine fetches: proxies, certificates
debian() { mmdebstrap --quiet --mode=root --variant=minbase --aptopt="$PWD/acquire" "$@" "$SOURCES"; }

debian --include=docker.io,docker-cli,docker-compose,iptables "$SUITE" made/engine
packages=$(sed -n 's/^RUN apt-get .*--no-install-recommends \([a-z0-9 -]*\).*/\1/p' <<< "$RECIPE" | xargs | tr ' ' ,)
debian --include="$packages" --customize-hook='rm -rf "$1"/etc/apt/sources.list*' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' "$SUITE" made/base.tar

version=$(tar -tf made/base.tar | sed -n 's,^\./usr/bin/python\(3\.[0-9]*\)$,\1,p')
sed -n 's/^dependencies = \[\(.*\)\]/\1/p' <<< "$RECIPE" | tr -d '" ' | tr , '\n' > needed
"$PYTHON" -m pip download -q --only-binary=:all: --python-version "$version" -d made/wheels -r needed
