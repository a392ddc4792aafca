#!/bin/bash
# Run by `lab compose` inside, as root: start Docker, build docker/Dockerfile, run docker/compose.yaml, judge it.
# $BOXES is what boxes.sh made, $PROFILE the profile; the wheel of this checkout is in $OUT/wheels.
set -euo pipefail
fail() { echo "lab: FAILED: $*"; exit 1; }
took() { echo "lab: $1: $((SECONDS - start)) s"; start=$SECONDS; }

# Docker's tree becomes the root, by pivot_root: runc does so for its containers, and can not where a chroot was.
enter() {
  modprobe -qa overlay veth bridge br_netfilter nf_tables nft_compat nft_chain_nat xt_nat xt_MASQUERADE xt_addrtype \
    xt_conntrack || true
  mkdir -p /run/root docker/wheels; cp "$BOXES"/wheels/*.whl "$OUT"/wheels/*.whl docker/wheels
  mount --bind "$BOXES/engine" /run/root; cd /run/root; mkdir -p old src boxes var/lib/docker
  for folder in dev proc sys; do mount --rbind /$folder $folder; done
  mount -t cgroup2 cgroup2 sys/fs/cgroup
  mount --bind "$RDMACONNECT_LAB_CHECKOUT" src; mount --bind "$BOXES" boxes
  mount -t tmpfs run run; mount -t tmpfs -o size=75% docker var/lib/docker
  pivot_root . old
  exec chroot . /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root bash /src/docker/compose.sh inside
}

engine() {
  dockerd --storage-driver overlay2 > /run/dockerd.log 2>&1 &
  timeout 120 sh -c 'until docker info; do sleep 1; done' > /dev/null 2>&1 || true
  docker version --format 'lab: Docker {{.Server.Version}} on kernel {{.Server.KernelVersion}}' || {
    tail -30 /run/dockerd.log; fail "dockerd does not answer"; }
  took "dockerd"
  docker import /boxes/base.tar "$(sed -n 's/^ARG BASE=//p' docker/Dockerfile)" > /dev/null; took "base image"
}

verified() {  # two results: one for RC, one for UD
  [ "$(grep -c 'contents verified' <<< "$1")" = 2 ] || fail "$2 does not tell of two ping-pongs"
}

case ${1-} in
  inside) ;;
  enter) enter;;
  *) exec unshare --mount --propagation private bash "$0" enter;;
esac
cd /src; start=$SECONDS
engine
compose() { docker compose --ansi never --progress "${progress:-quiet}" -f docker/compose.yaml "$@"; }
server=server client=client SERVER_OPTIONS='--deadline 120' CLIENT_OPTIONS='--deadline 120'
[ "$PROFILE" = netns ] || {
  server=host-server client=host-client SERVER=10.9.0.2; SERVER_OPTIONS+=' -d rxe2' CLIENT_OPTIONS+=' -d rxe1'; }
PACKAGE=$(echo /src/docker/wheels/rdmaconnect-*.whl) PIP_NO_INDEX=1 PIP_FIND_LINKS=/src/docker/wheels
export SERVER SERVER_OPTIONS CLIENT_OPTIONS PACKAGE PIP_NO_INDEX PIP_FIND_LINKS ITERS="${ITERS:-100}" BUILDX_GIT_INFO=0
progress=plain compose build "$client"; took "docker compose build"
docker images rdmaconnect

status=0; echo "lab: the client's container:"
said=$(compose run --rm "$client" 2>&1 | tee /proc/self/fd/2) || status=$?
took "docker compose run"
id=$(compose ps -aq "$server"); ended=$(timeout 60 docker wait "$id") || ended="none: it still runs"
echo "lab: the server's container:"; heard=$(docker logs "$id" 2>&1 | tee /proc/self/fd/2)
if [ "$status$ended" != 00 ]; then
  compose --profile "$PROFILE" logs; compose --profile "$PROFILE" ps -a; tail -20 /run/dockerd.log
  fail "the client ended with $status, the server with $ended"
fi
verified "$said" "the client"; verified "$heard" "the server"
echo "lab: RC and UD between two containers, profile $PROFILE: passed"
