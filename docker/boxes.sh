#!/bin/bash
# Run by `lab` outside, anew when $RECIPE changes, the lines of the Dockerfile and of the project that say what to fetch.
# Makes ./made, what Docker takes where no registry can be reached: a tree of $SUITE with Docker in it; a base image of
# the same suite with all packages that the Dockerfile asks for, so that its apt-get finds them there; pip's wheels.
set -euo pipefail
mkdir -p made/wheels; apt-config dump Acquire > acquire  # how this machine fetches: proxies, certificates
debian() { mmdebstrap --quiet --mode=root --variant=minbase --aptopt="$PWD/acquire" "$@" "$SOURCES"; }

debian --include=docker.io,docker-cli,docker-compose,iptables "$SUITE" made/engine
packages=$(sed -n 's/^RUN apt-get .*--no-install-recommends \([a-z0-9 -]*\).*/\1/p' <<< "$RECIPE" | xargs | tr ' ' ,)
slim=(--dpkgopt='path-exclude=/usr/share/'{doc,man,locale}'/*')
# No sources: apt-get update has nothing to do, apt-get install finds all there.
debian --include="$packages" --customize-hook='cd "$1/etc/apt" && rm -f sources.list.d/* && echo > sources.list' \
  "${slim[@]}" "$SUITE" made/base.tar

version=$(tar -tf made/base.tar | sed -n 's,^\./usr/bin/python\(3\.[0-9]*\)$,\1,p')
sed -n 's/^dependencies = \[\(.*\)\]/\1/p' <<< "$RECIPE" | tr -d '" ' | tr , '\n' > needed
"$PYTHON" -m pip download -q --only-binary=:all: --python-version "$version" -d made/wheels -r needed
