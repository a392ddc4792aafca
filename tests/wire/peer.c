/* A peer of rdmaconnect in C, written by docs/wire.md: libzmq, msgpack-c, libibverbs. One RC queue pair, port 1.
 *
 *   peer connect URL DEVICE GID_INDEX [PUBLIC SECRET LISTENER]    the keys in Z85: with CURVE
 *   peer listen  URL DEVICE GID_INDEX [PUBLIC SECRET CONNECTOR]
 *
 * Once the data path is proven each side sends one message; who connected says bye.
 * cc peer.c -o peer -lzmq -lmsgpackc -libverbs        (-lmsgpack-c since msgpack-c 6)
 */
#include "messages.h"

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <net/if.h>
#include <sys/random.h>
#include <time.h>
#include <zmq.h>

enum { RSZ = 16384, SLOTS = 16, BEAT = 1000, SMALL = 16, PATIENCE_S = 60 };

/* ---- the queue pair */

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static uint8_t memory[(SLOTS + 2) * RSZ] __attribute__((aligned(4096))); /* receives, and two messages to send */
static struct message mine, theirs;

static void post_recv(unsigned slot)
{
	struct ibv_sge sge = {(uintptr_t)memory + slot * RSZ, RSZ, mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1}, *bad;
	if (ibv_post_recv(qp, &wr, &bad))
		die("ibv_post_recv failed");
}

static void post_send(unsigned place, unsigned size)
{
	struct ibv_sge sge = {(uintptr_t)memory + (SLOTS + place) * RSZ, size, mr->lkey};
	struct ibv_send_wr wr = {.wr_id = SLOTS, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				 .send_flags = IBV_SEND_SIGNALED}, *bad;
	if (ibv_post_send(qp, &wr, &bad))
		die("ibv_post_send failed");
}

/* Make the queue pair, take it to INIT, post receives, and put down what the peer is told of it. */
static void open_end(const char *device, unsigned gid_index)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_port_attr port;
	struct ibv_device_attr attr;
	struct ibv_gid_entry entry;
	struct gid *gid = &mine.port.gids[0];
	while (list && *list && strcmp(ibv_get_device_name(*list), device))
		list++;
	if (!list || !*list || !(context = ibv_open_device(*list)))
		die("%s cannot be opened", device);
	if (ibv_query_device(context, &attr) || ibv_query_port(context, 1, &port) || port.state != IBV_PORT_ACTIVE)
		die("port 1 of %s is not ACTIVE", device);
	if (ibv_query_gid_ex(context, 1, gid_index, &entry, 0))
		die("gid_index %u of %s is empty", gid_index, device);
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 2 * SLOTS, NULL, NULL, 0);
	mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					.cap = {.max_send_wr = 4, .max_recv_wr = SLOTS, .max_send_sge = 1, .max_recv_sge = 1}};
	if (!pd || !cq || !mr || !(qp = ibv_create_qp(pd, &init)))
		die("no queue pair can be made on %s", device);
	/* a peer may ask with a write of no bytes whether this end is there */
	struct ibv_qp_attr to_init = {.qp_state = IBV_QPS_INIT, .port_num = 1,
				      .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE};
	if (ibv_modify_qp(qp, &to_init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		die("RESET to INIT failed");
	for (unsigned slot = 0; slot < SLOTS; slot++)
		post_recv(slot);
	snprintf(mine.port.dev, sizeof mine.port.dev, "%s", device);
	mine.port.num = 1, mine.port.ll = port.link_layer, mine.port.lid = port.lid, mine.port.mtu = port.active_mtu;
	mine.port.msz = port.max_msg_sz;
	mine.port.ord = attr.max_qp_init_rd_atom > 255 ? 255 : attr.max_qp_init_rd_atom;
	mine.port.ird = attr.max_qp_rd_atom > 255 ? 255 : attr.max_qp_rd_atom;
	for (unsigned i = 0; i < port.pkey_tbl_len && i < PKEYS; i++) {
		uint16_t key;
		if (!ibv_query_pkey(context, 1, i, &key))
			mine.port.pkeys[mine.port.npkeys++] = ntohs(key);
	}
	memcpy(gid->raw, entry.gid.raw, 16);
	gid->type = entry.gid_type, gid->index = gid_index, mine.port.ngids = 1;
	if (entry.ndev_ifindex)
		if_indextoname(entry.ndev_ifindex, gid->netdev);
	mine.qpt = IBV_QPT_RC, mine.qpn = qp->qp_num, mine.rsz = RSZ, mine.beat = BEAT;
	if (getrandom(&mine.psn, 3, 0) != 3)
		die("there is no chance");
}

static void to_rtr(const struct gid *dgid)
{
	unsigned index = 0, ird = mine.port.ird < theirs.port.ord ? mine.port.ird : theirs.port.ord;
	while (index + 1 < mine.port.npkeys && (mine.port.pkeys[index] & 0x7fff) != mine.agree.pkey)
		index++;
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = mine.agree.mtu, .dest_qp_num = theirs.qpn, .rq_psn = theirs.psn,
		.max_dest_rd_atomic = ird, .min_rnr_timer = 12, .pkey_index = index,
		.ah_attr = {.is_global = 1, .port_num = 1, .sl = mine.agree.sl, .dlid = theirs.port.lid,
			    .grh = {.sgid_index = mine.port.gids[0].index, .hop_limit = 64, .flow_label = mine.agree.fl,
				    .traffic_class = mine.agree.tc}}};
	memcpy(attr.ah_attr.grh.dgid.raw, dgid->raw, 16);
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER | IBV_QP_PKEY_INDEX))
		die("INIT to RTR failed");
}

static void to_rts(void)
{
	unsigned ord = mine.port.ord < theirs.port.ird ? mine.port.ord : theirs.port.ird;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .sq_psn = mine.psn, .timeout = 14, .retry_cnt = 7,
				   .rnr_retry = 7, .max_rd_atomic = ord};
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				     IBV_QP_MAX_QP_RD_ATOMIC))
		die("RTR to RTS failed");
}

/* As the listener: what both do, or a difference. */
static void agree(void)
{
	struct gid *own = &mine.port.gids[0];
	unsigned least = theirs.wish.mtu < theirs.port.mtu ? theirs.wish.mtu : theirs.port.mtu;
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
	for (unsigned i = 0; i < theirs.port.ngids && !mine.agree.has_gids; i++) {
		struct gid *other = &theirs.port.gids[i];
		if (other->type == own->type && !memcmp(other->raw, mapped, 12) == !memcmp(own->raw, mapped, 12))
			mine.agree.cg = *other, mine.agree.lg = *own, mine.agree.has_gids = 1;
	}
	for (unsigned i = 0; i < mine.port.npkeys; i++)
		for (unsigned j = 0; j < theirs.port.npkeys; j++) {
			unsigned a = mine.port.pkeys[i], b = theirs.port.pkeys[j];
			if (!mine.agree.pkey && (a & 0x7fff) && (a & 0x7fff) == (b & 0x7fff) && ((a | b) & 0x8000) &&
			    (!theirs.wish.has_pkey || (theirs.wish.pkey & 0x7fff) == (a & 0x7fff)))
				mine.agree.pkey = a & 0x7fff;
		}
	mine.agree.mtu = mine.port.mtu < least ? mine.port.mtu : least;
	mine.agree.sl = theirs.wish.sl, mine.agree.tc = theirs.wish.tc, mine.agree.fl = theirs.wish.fl;
}

/* ---- the conversation */

static void *zmq, *channel, *zap;
static int is_listener, heard, in_rts, probing, probes_came, said_proof, proved, greeted, answered, over;
static const char *peer_key;

static void say(const char *type)
{
	struct message *m = &mine;
	unsigned beat = m->beat; /* only hello and reply tell of it */
	snprintf(m->type, sizeof m->type, "%s", type);
	m->beat = strcmp(type, "hello") && strcmp(type, "reply") ? 0 : beat;
	write_message(m);
	m->beat = beat;
	if (zmq_send(channel, frame.data, frame.size, 0) < 0)
		die("%s cannot be sent: %s", type, zmq_strerror(errno));
}

static void fill_probe(uint8_t *into, unsigned size)
{
	for (unsigned i = 0; i < size; i++)
		into[i] = i % 20 < 16 ? mine.id[i % 20] : 0; /* 16 of id, 4 of the queue pair's index, which is 0 */
}

static unsigned large(unsigned rsz)
{
	unsigned two = 2 * (128u << mine.agree.mtu) + 1;
	return rsz < two ? rsz : two;
}

static void start_proof(void)
{
	in_rts = 1;
	if (!probing)
		return;
	fill_probe(memory + SLOTS * RSZ, SMALL), fill_probe(memory + (SLOTS + 1) * RSZ, large(theirs.rsz));
	post_send(0, SMALL), post_send(1, large(theirs.rsz));
}

static void on_hello(const struct message *m)
{
	theirs = *m, heard = 1, probing = m->wish.probe;
	memcpy(mine.id, m->id, 16);
	agree();
	if (m->qpt != IBV_QPT_RC || !mine.agree.has_gids || !mine.agree.pkey) {
		snprintf(mine.stage, sizeof mine.stage, "agree");
		snprintf(mine.why, sizeof mine.why, "this peer has RC, and GIDs or P_Keys in common are due");
		say("reject");
		die("%s", mine.why);
	}
	to_rtr(&mine.agree.cg);
	say("reply");
}

static void on_reply(const struct message *m)
{
	theirs = *m, heard = 1, mine.agree = m->agree;
	if (!m->agree.has_gids || memcmp(m->agree.cg.raw, mine.port.gids[0].raw, 16) || m->agree.mtu > mine.port.mtu)
		die("the listener agreed on what this end does not have");
	probing = !m->agree.unproven;
	to_rtr(&m->agree.lg);
	to_rts();
	say("ready");
	start_proof();
}

static void on_message(const struct message *m)
{
	if (is_listener && !heard && !strcmp(m->type, "hello")) {
		on_hello(m);
		return;
	}
	if (memcmp(m->id, mine.id, 16))
		return; /* of another conversation */
	if (!is_listener && !heard && !strcmp(m->type, "reply"))
		on_reply(m);
	else if (is_listener && heard && !in_rts && !strcmp(m->type, "ready")) {
		to_rts();
		if (theirs.beat && probing)
			say("joined");
		start_proof();
	} else if (!strcmp(m->type, "proof"))
		proved = 1;
	else if (!strcmp(m->type, "beat") && m->ask)
		say("beat");
	else if (!strcmp(m->type, "reject"))
		die("rejected at %s: %s (%u)", m->stage, m->why, m->error);
	else if (!strcmp(m->type, "bye"))
		printf("bye: %s\n", m->why), over = 1;
}

static void on_received(unsigned slot, unsigned size)
{
	uint8_t *came = memory + slot * RSZ;
	static uint8_t due[RSZ];
	unsigned size_due = probes_came == 0 ? SMALL : large(RSZ);
	if (probing && probes_came < 2) {
		fill_probe(due, size);
		if (size != size_due || memcmp(came, due, size))
			die("probe %d is %u bytes, and not what is due", probes_came, size);
		probes_came++;
	} else
		answered = 1, printf("message: %.*s\n", (int)size, came);
	post_recv(slot);
}

static void progress(void)
{
	struct ibv_wc wc;
	while (ibv_poll_cq(cq, 1, &wc) > 0) {
		if (wc.status != IBV_WC_SUCCESS)
			die("a work request failed: %s", ibv_wc_status_str(wc.status));
		if (wc.wr_id < SLOTS)
			on_received(wc.wr_id, wc.byte_len);
	}
	if (in_rts && probing && probes_came == 2 && !said_proof)
		say("proof"), said_proof = 1;
	if (in_rts && !greeted && (!probing || (said_proof && proved))) {
		const char *words = is_listener ? "from a listener in C" : "from a connector in C";
		memcpy(memory + SLOTS * RSZ, words, strlen(words)), post_send(0, strlen(words));
		greeted = 1;
	}
	if (!is_listener && answered && greeted) {
		snprintf(mine.why, sizeof mine.why, "enough said");
		say("bye"), over = 1;
	}
}

/* Whether a public key may come in: ZeroMQ asks so (RFC 27), and would let everybody in without an answer. */
static void answer_zap(void)
{
	uint8_t part[7][256], key[32];
	int size[7], last = 0, more = 1;
	for (; more && last < 7; last++) {
		size_t room = sizeof more;
		size[last] = zmq_recv(zap, part[last], sizeof part[last], 0);
		zmq_getsockopt(zap, ZMQ_RCVMORE, &more, &room);
	}
	int known = last == 7 && size[6] == 32 && zmq_z85_decode(key, peer_key) && !memcmp(key, part[6], 32);
	const char *parts[] = {"1.0", NULL, known ? "200" : "400", known ? "OK" : "unknown key", "", ""};
	for (int i = 0; i < 6; i++)
		zmq_send(zap, i == 1 ? (char *)part[1] : parts[i], i == 1 ? size[1] : (int)strlen(parts[i]),
			 i < 5 ? ZMQ_SNDMORE : 0);
}

static void open_channel(const char *url, char **keys)
{
	int linger = 1000, longest = MAX_FRAME, on = 1, never = -1;
	zmq = zmq_ctx_new();
	channel = zmq_socket(zmq, ZMQ_DEALER);
	zmq_setsockopt(channel, ZMQ_LINGER, &linger, sizeof linger);
	zmq_setsockopt(channel, ZMQ_RECONNECT_IVL, &never, sizeof never); /* a conversation does not begin anew by itself */
	int64_t most = longest + 33; /* what CURVE adds */
	zmq_setsockopt(channel, ZMQ_MAXMSGSIZE, &most, sizeof most);
	if (keys) {
		zmq_setsockopt(channel, ZMQ_CURVE_PUBLICKEY, keys[0], 41);
		zmq_setsockopt(channel, ZMQ_CURVE_SECRETKEY, keys[1], 41);
		peer_key = keys[2];
		if (is_listener) {
			zap = zmq_socket(zmq, ZMQ_REP);
			zmq_bind(zap, "inproc://zeromq.zap.01");
			zmq_setsockopt(channel, ZMQ_CURVE_SERVER, &on, sizeof on);
			zmq_setsockopt(channel, ZMQ_ZAP_DOMAIN, "rdma", 4);
		} else
			zmq_setsockopt(channel, ZMQ_CURVE_SERVERKEY, peer_key, 41);
	}
	if (is_listener ? zmq_bind(channel, url) : zmq_connect(channel, url))
		die("%s: %s", url, zmq_strerror(errno));
}

int main(int argc, char **argv)
{
	static struct message m;
	static uint8_t raw[MAX_FRAME];
	msgpack_sbuffer_init(&frame);
	if ((argc != 5 && argc != 8) || (strcmp(argv[1], "connect") && strcmp(argv[1], "listen")))
		die("usage: peer connect URL DEVICE GID_INDEX [KEYS] | listen URL DEVICE GID_INDEX [KEYS]");
	is_listener = !strcmp(argv[1], "listen");
	open_end(argv[3], atoi(argv[4]));
	open_channel(argv[2], argc == 8 ? argv + 5 : NULL);
	if (!is_listener) {
		if (getrandom(mine.id, 16, 0) != 16)
			die("there is no chance");
		mine.wish.mtu = 5, mine.wish.probe = probing = 1, mine.patience = PATIENCE_S * 1000;
		say("hello");
	}
	printf("%s\n", is_listener ? "listening" : "asked"), fflush(stdout);
	time_t began = time(NULL), said = began;
	while (!over) {
		zmq_pollitem_t items[] = {{channel, 0, ZMQ_POLLIN, 0}, {zap, 0, ZMQ_POLLIN, 0}};
		zmq_poll(items, zap ? 2 : 1, heard ? 1 : 100);
		if (zap && items[1].revents)
			answer_zap();
		if (items[0].revents) {
			int size = zmq_recv(channel, raw, sizeof raw, 0);
			if (size < 0 || size > MAX_FRAME)
				die("a frame is too long");
			read_message(raw, size, &m);
			on_message(&m);
		}
		progress(); /* after a bye too: what the peer sent before it has come */
		if (!over && heard && theirs.beat && time(NULL) > said)
			say("beat"), said = time(NULL);
		if (time(NULL) - began > PATIENCE_S)
			die("no success within %d s", PATIENCE_S);
	}
	zmq_close(channel);
	if (zap)
		zmq_close(zap);
	zmq_ctx_term(zmq);
	ibv_destroy_qp(qp), ibv_dereg_mr(mr), ibv_destroy_cq(cq), ibv_dealloc_pd(pd), ibv_close_device(context);
	return answered ? 0 : 1;
}
