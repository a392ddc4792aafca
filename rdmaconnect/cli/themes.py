"""What the classes of our errors mean, and what people ask about that no number names: for ``rdmaconnect explain``.

Each text tells the cause, then what to type next. Sources: as :mod:`rdmaconnect.hints`.
"""

from __future__ import annotations

from ..hints import HINTS

__all__ = ["CLASSES", "THEMES"]

#: class of our errors -> when it comes, and what to do
CLASSES: dict[str, tuple[str, str]] = {
    "RdmaConnectError": ("All others derive from it.", "Catch it where any failure is handled alike."),
    "LibraryError": (
        "With the first call, or when a device is asked for what its provider lacks.",
        "Install libibverbs and its providers (Debian, Ubuntu: `apt install ibverbs-providers`), or a newer rdma-core.",
    ),
    "DeviceError": (
        "Before anything is exchanged: this host has no port to connect with, or not the one that was named.",
        "`rdmaconnect devices` lists what there is; `rdma link` and `ip link` tell the states.",
    ),
    "VerbsError": (
        "When the kernel or the provider refuses a verb.",
        "Ask for its errno: `rdmaconnect explain ENOMEM`, for example.",
    ),
    "ModifyError": (
        "When a queue pair cannot go to its next state; most often INIT->RTR, where RoCE resolves the peer's address.",
        "Ask for its errno, for example `rdmaconnect explain ETIMEDOUT`; `rdmaconnect states RC` tells what is needed.",
    ),
    "PostError": (
        "When a work request is not even taken: the queue is full, or the request does not fit the queue pair.",
        "Those counted in .posted are on their way; wait for completions, and post the rest again.",
    ),
    "CompletionError": (
        "After work was posted, or while the data path is proven; the queue pair is in ERR then.",
        "Ask for its status, for example `rdmaconnect explain RETRY_EXC_ERR`; `conn.reconnect()` starts anew.",
    ),
    "StateError": ("When an object is used after its end, or too early.", "It is the program's own order to mend."),
    "PeerMismatch": (
        "When both ends have told what they have, and nothing fits: types, GIDs, P_Keys, link layers.",
        "Each of .differences must go; compare `rdmaconnect devices` on both hosts.",
    ),
    "PeerRejected": (
        "When the peer failed at its side; its own words are in the message.",
        "Mend it there: the reason is what the peer's own error says.",
    ),
    "PeerClosed": (
        "When the peer closed, died or vanished; 15 seconds of silence count as gone.",
        "`conn.reconnect()` where the peer comes back; see the peer's log for why it went.",
    ),
    "AuthenticationError": (
        "While the exchange is set up: another secret or key, or one side without any.",
        "Give both sides the same RDMACONNECT_SECRET, or each other's key files (`rdmaconnect keygen`).",
    ),
    "OutcomeUnknown": (
        "When a connection was lost and is connected anew (auto_reconnect, reconnect()), of what was on its way.",
        "Ask the peer whether it has it, or repeat what may happen twice: it is not repeated by itself.",
    ),
    "ProtocolError": ("One of its two kinds comes.", "See LocalProtocolError and RemoteProtocolError."),
    "LocalProtocolError": (
        "When this side's program asks for something out of turn.",
        "It is this library's own fault if `connect` or `accept` raise it: report it.",
    ),
    "RemoteProtocolError": (
        "When something else listens at that address, or another version of this library.",
        "Check host and port (`ss -ltnp` on the peer), and the versions on both (`rdmaconnect --version`).",
    ),
    "DeadlineExceeded": (
        "When deadline_s has passed; the message names the step that was waited for.",
        "See why that step stands still, at the peer too; or give more time with deadline_s.",
    ),
    "ConnectTimeout": (
        "When the connection did not stand by deadline_s; the message names the step and what was seen until then.",
        "Is the peer's program in accept()? `ss -ltn` there; a firewall must let TCP 18515 and UDP 4791 pass.",
    ),
}

#: theme -> cause and remedy
THEMES: dict[str, str] = {
    "access": (
        "RDMA write, read and atomics need the right twice. REM_ACCESS_ERR: the region's key, range or flags do not "
        "allow it (`conn.register(buffer, access)`). REM_INV_REQ_ERR: the queue pair does not (qp_access_flags, for "
        "reads max_dest_rd_atomic). UC drops in silence. Remote write needs LOCAL_WRITE too."
    ),
    "address": (
        "A peer must be given an address that its host reaches: 127.x.x.x is each host itself, and /etc/hosts often "
        "has that for a host's own name. `getent ahosts NAME` tells, `ip -brief addr` lists the others; "
        "listen() takes all of them."
    ),
    "arp-flux": (
        "Two network devices of a host in one subnet: either answers ARP for both addresses, so that RoCE packets come "
        "to the one that drops them, and RTR succeeds while no data passes. connect() takes a pair that carries, if "
        "there is one. `sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2`, rp_filter 0 or 2; "
        "or a subnet for each."
    ),
    "containers": (
        "A container needs the device nodes, the locked memory and the network that has the GIDs: docker run "
        "--device /dev/infiniband --ulimit memlock=-1 --network host; in Kubernetes an RDMA device plugin and its "
        "network. ENOENT, EACCES and EPERM at ibv_open_device tell which of them is missing."
    ),
    "cq-overrun": (
        "A completion queue must hold all that can complete before it is polled, of all its queue pairs. What does not "
        "fit is lost, though its data was delivered: give a larger cqe, or poll sooner; CQ_ERR of Context.events tells."
    ),
    "data-path": (
        "RTR and RTS succeed where no data can pass. So both ends send each other 16 bytes, then more than two path "
        "MTUs, before connect() and accept() return (probe=True), and say what is lost: a firewall, a smaller MTU "
        "between, another PSN. `rdmaconnect doctor HOST` tries all pairs of GIDs."
    ),
    "deadline": (
        "Every call that waits takes deadline_s, and one deadline covers all of connect() on each side. Its error "
        "names the step that was waited for."
    ),
    "firewall": (
        "RoCE v2 is UDP port 4791, the exchange TCP port 18515. Behind a firewall RTR succeeds, and data ends with "
        "RETRY_EXC_ERR. See `nft list ruleset` and `iptables -L -n` on both hosts; "
        "`nft insert rule inet filter input udp dport 4791 accept` lets it in."
    ),
    "fork": (
        "What was opened before a fork belongs to the parent; a child must open its own. Use the `spawn` start method "
        "of multiprocessing, or connect after the fork; RDMAV_FORK_SAFE=1 protects registered memory on old kernels."
    ),
    "gid": (
        "A GID index means nothing on another host, and moves when an address is added anew: leave gid_index out, and "
        "the pair is chosen by value (RoCE v2, one family, routable, same subnet). See `rdmaconnect devices`."
    ),
    "grh": (
        "Ethernet needs the global header (is_global=1, sgid_index, dgid), InfiniBand only between subnets. LID 0 on "
        "InfiniBand means that there is no subnet manager: `sminfo` asks for it."
    ),
    "hop-limit": (
        "For RC the kernel takes the route's hop limit, whatever it was given; in a UD address handle the caller's "
        "counts, and 1 does not pass a router: leave hop_limit at 64."
    ),
    "limits": (
        "A device's limits are upper bounds, and some drivers take what is beyond them and fail later: "
        "`rdmaconnect devices -v` lists max_qp_wr, max_sge, max_cqe, max_qp_rd_atom and the rest."
    ),
    "many": (
        "Connect many in one exchange (connect_many), which share one completion queue and channel: a context takes 2 "
        "descriptors, a channel 1, a queue pair 0. `ulimit -n` must hold those, query_device().max_qp the queue pairs."
    ),
    "memlock": (
        f"Registered memory stays locked in RAM, and the user has a limit for that. {HINTS['ibv_reg_mr', 'ENOMEM']}"
    ),
    "mtu": (
        "Both ends must use one path_mtu, and the network between must carry it with its headers: the Ethernet MTU "
        "1500 carries 1024, for 4096 it takes 4200. Else small messages pass and large ones vanish: "
        "`ip link` tells the MTU, and path_mtu=1024 is safe."
    ),
    "netns": (
        "A RoCE GID can only be used where its network device is. In shared mode devices of other network namespaces "
        "are listed all the same, in exclusive mode hidden: `rdma system show` tells it, `rdma system set netns "
        "shared` changes it, `rdma dev set rxe0 netns NAME` moves a device."
    ),
    "pkey": (
        "Both ends need a partition key in common, one of them as a full member (0x8000 set): compare the tables "
        "(`rdmaconnect devices -v`) and see the subnet manager's partitions.conf."
    ),
    "port-in-use": (
        "Another program, or one left over, listens on the TCP port: `ss -ltnp` names it. Port 0 takes a free one."
    ),
    "port-state": (
        "Only an ACTIVE port carries data. DOWN: `ip link set DEV up`, and see the cable. INIT or ARMED on InfiniBand: "
        "no subnet manager has been there yet, start opensm. `rdmaconnect devices` tells the states."
    ),
    "provider": (
        "libibverbs needs the provider of the device, of a version that fits the kernel: `ibv_devices` lists what it "
        "finds, and warns if none does. Debian, Ubuntu: `apt install ibverbs-providers`."
    ),
    "psn": (
        "Each end must expect the packet number that the other one starts from (rq_psn here is sq_psn there). Off by a "
        "little, the first messages are lost with success; off by more, it ends with RETRY_EXC_ERR."
    ),
    "ready": (
        "What is sent before the other end is in RTR, with receives posted, is retried until RETRY_EXC_ERR, or lost. "
        "connect() and accept() return when both ends can receive, and either may start first; "
        "where both sides call each other, use meet()."
    ),
    "restart": (
        "A peer that was started anew has other queue pairs: what is sent to the old ones ends with RETRY_EXC_ERR. "
        "`conn.reconnect()` on both sides connects the same objects anew."
    ),
    "rnr": (
        "A message came where no receive was posted. rnr_retry=7 asks for ever, but SoftRoCE of Linux 6.1 lets the ack "
        "timer go on meanwhile: detect_s=20 leaves seconds. min_rnr_timer 0 means 655 ms, 12 means 0.64 ms. Receive "
        "sooner, or ask for a larger recv_depth."
    ),
    "roce-version": (
        "RoCE v1 (EtherType 0x8915) and v2 (UDP 4791) do not understand each other: both GIDs must be of one type. "
        "`rdmaconnect devices` shows the type of each; v2 is the one that is routed."
    ),
    "route": (
        "RoCE sends from the GID's network device, whatever the routing table prefers: ETIMEDOUT at RTR means that the "
        "peer did not answer ARP there. `ping -I ADDRESS PEER`, `ip neigh`, `ip route get PEER from ADDRESS`."
    ),
    "timers": (
        "timeout is a code, 4.096 us * 2**timeout for each of retry_cnt + 1 tries; 0 means for ever, and so does "
        "retry_cnt=7 on SoftRoCE. Adapters may wait four times as long, and some never less than 0.5 s. The defaults, "
        "14 and 3, give up within 2 seconds; detect_s= sets both."
    ),
    "ud": (
        "UD loses without a word: a message without a receive posted, with another Q_Key, longer than the MTU, or into "
        "a buffer that is short of the 40 bytes of GRH. Sends succeed all the same; count on the application's answer."
    ),
    "version": "Both sides must speak the same version of the exchange: `rdmaconnect --version` on each.",
}
