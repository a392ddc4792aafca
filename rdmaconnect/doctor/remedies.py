"""What to type. Data: remedy -> the words, with ``{...}`` for the host's own names. Pure."""

from __future__ import annotations

__all__ = ["REMEDIES", "remedy"]

REMEDIES: dict[str, str] = {
    "load core": "modprobe ib_uverbs",
    "load on the host": "on the container's host: modprobe ib_uverbs, and the driver of its adapter",
    "other kernel": (
        "boot a kernel that has RDMA (Debian: linux-image-amd64); to try things without: docker/lab pingpong"
    ),
    "soft device": "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev {netdev}",
    "driver": "modprobe the adapter's driver (mlx5_ib, irdma, bnxt_re ...); dmesg tells of its trouble",
    "library": "apt install ibverbs-providers (Debian, Ubuntu) or dnf install libibverbs (Fedora, RHEL)",
    "provider": "apt install ibverbs-providers, of libibverbs's own version",
    "pass node": "docker run --device /dev/infiniband",
    "pass node to pod": "a device plugin, or a hostPath volume with privileged: true: docker/kubernetes.yaml",
    "make node": "modprobe ib_uverbs and wait for udev; or mknod by /sys/class/infiniband_verbs/{node}/dev",
    "join group": "usermod -aG {group} {user}, then log in anew",
    "open node": "chmod 666 {path}, or a udev rule with GROUP= and MODE=0660",
    "shared mode": (
        "rdma system set netns shared; or, to keep exclusive mode, rdma dev set {device} netns NAME "
        "gives this namespace the device"
    ),
    "link up": "ip link set {netdev} up",
    "carrier": "check the cable, the switch port, or the other end of the veth pair: ip link show {netdev}",
    "subnet manager": "start one on the fabric: opensm, or the switch's own",
    "address": "ip addr add ADDRESS/PREFIX dev {netdev}",
    "address here": "run where {netdev} is, for example: docker run --network host, ip netns exec NAME",
    "network of pod": "hostNetwork: true, or a second network with the adapter in the pod: docker/kubernetes.yaml",
    "memlock shell": "ulimit -l unlimited; to keep it: '* - memlock unlimited' in /etc/security/limits.conf",
    "memlock container": "docker run --ulimit memlock=-1 --cap-add IPC_LOCK",
    "memlock pod": (
        "LimitMEMLOCK=infinity in the container runtime's unit; or, for root, add: [IPC_LOCK]: docker/kubernetes.yaml"
    ),
    "memlock service": "LimitMEMLOCK=infinity in the systemd unit",
    "nofile": "ulimit -n {wanted}; LimitNOFILE= in a systemd unit, docker run --ulimit nofile={wanted}",
    "firewall nft": "nft insert rule inet filter input udp dport 4791 accept; tcp dport {port} too",
    "firewall iptables": "iptables -I INPUT -p udp --dport 4791 -j ACCEPT; -p tcp --dport {port} too",
    "firewall firewalld": "firewall-cmd --add-port=4791/udp --add-port={port}/tcp",
    "firewall ufw": "ufw allow 4791/udp; ufw allow {port}/tcp",
    "serve": "there: rdmaconnect doctor --serve -p {port}",
    "open tcp": "let the exchange in there: nft insert rule inet filter input tcp dport {port} accept",
    "fork": "export RDMAV_FORK_SAFE=1, or start children before the first connection, or use a kernel from 5.12 on",
    "arp": "sysctl -w {settings}; or give each network device a subnet of its own",
    "driver file": "echo 'driver {provider}' > {path}; or apt install --reinstall ibverbs-providers",
    "stale driver file": "rm {path}, or install the provider that it names, of libibverbs's own version",
    "roce v2": "give the network device an IPv4 or global IPv6 address, and use RoCE v2",
    "mtu": "ip link set {netdev} mtu 4200, on both hosts and what is between them",
}


def remedy(*names: str, **words: object) -> str:
    """The words of some remedies, one after the other; those for another place are told apart by "or"."""
    return "; or ".join(REMEDIES[name].format(**words) for name in names)
