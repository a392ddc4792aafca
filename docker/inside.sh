#!/bin/bash
# Sourced by `lab` inside, as root: make the nodes, run the job, leave its status in $OUT/rc.
cd "$RDMACONNECT_LAB_CHECKOUT" && mkdir -p "$OUT/bin" || exit
export PATH="$OUT/bin:$VENV/bin:$PATH" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export RDMACONNECT_LAB=1 RDMACONNECT_LAB_PYTHON="$VENV/bin/python" RDMACONNECT_LAB_LAYOUT=netns
enter='ip netns exec "n$i"'
[ "$(uname -r | cut -d. -f1)" -ge 7 ] || { export RDMACONNECT_LAB_LAYOUT=rig; enter=; }
printf '#!/bin/bash\ni=$1; shift; exec %s "$@"\n' "$enter" > "$OUT/bin/on"; chmod +x "$OUT/bin/on"

netns() {  # n1..nN, each with its e<i> on a bridge
  ip link add br0 type bridge; ip link set br0 up
  for i in $(seq "$RDMACONNECT_LAB_NODES"); do
    ip netns add "n$i"; ip -n "n$i" link set lo up
    on "$i" sh -c 'echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad' || true
    ip link add "h$i" type veth peer name "e$i" netns "n$i"; ip link set "h$i" master br0 mtu 4200 up
    ip -n "n$i" addr add "10.9.0.$i/16" dev "e$i"; ip -n "n$i" link set "e$i" mtu 4200 up
    on "$i" rdma link add "rxe$i" type rxe netdev "e$i"
  done
}
rig() {  # e1 and e2 in one namespace; the rules keep what goes between them on the cable, off lo
  [ "$RDMACONNECT_LAB_NODES" = 2 ] || { echo "lab: kernel $(uname -r) holds exactly 2 nodes"; exit 1; }
  echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad || true; echo 1 > /proc/sys/net/ipv4/conf/all/accept_local
  ip rule add pref 20 lookup local; ip rule del pref 0 lookup local; ip link add e1 type veth peer name e2
  for i in 1 2; do
    ip addr add "10.9.0.$i/16" dev "e$i"; ip link set "e$i" mtu 4200 up
    ip rule add pref "1$i" oif "e$i" lookup "10$i"
    ip route add 10.9.0.0/16 dev "e$i" src "10.9.0.$i" table "10$i"
    rdma link add "rxe$i" type rxe netdev "e$i"
  done
}
work() {  # once each port is ACTIVE and its GID 1 is the node's IPv4 address
  modprobe -qa rdma_rxe ib_uverbs rdma_ucm veth bridge; ip link set lo up; ulimit -l unlimited
  (set -e; $RDMACONNECT_LAB_LAYOUT); [ $? = 0 ] || { echo "lab: the nodes could not be made"; return 125; }
  for i in $(seq "$RDMACONNECT_LAB_NODES"); do
    port=/sys/class/infiniband/rxe$i/ports/1
    for try in $(seq 100); do
      on "$i" grep -q ACTIVE $port/state && on "$i" grep -q ffff:0a09 $port/gids/1 && continue 2; sleep 0.2
    done 2> /dev/null
    echo "lab: rxe$i is not ACTIVE with an address after 20 s"; rdma link; return 125
  done
  bash "$OUT/$1"
}
if [ -e "$OUT/tty" ]; then work tty; rc=$?
else  # through a pipe: a job may open /dev/stdout anew, and what it leaves running may hold it open
  exec 3> >(exec cat > "$OUT/log") || exit; cat=$!; work job >&3 2>&1 3>&- < /dev/null; rc=$?
  exec 3>&-; for try in $(seq 20); do kill -0 $cat 2> /dev/null || break; sleep 0.1; done
fi
echo $rc > "$OUT/rc.part"; mv "$OUT/rc.part" "$OUT/rc"
