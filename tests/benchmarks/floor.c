/* The floor: what connecting costs a C program that knows all beforehand, and destroying.
 *
 *     floor listen|connect DEVICE GID_INDEX ADDRESS
 *
 * Told what to do line by line on stdin, it answers with one line of JSON each, as the Python programs here do:
 *
 *     connect COUNT RECV_DEPTH RECV_SIZE SEND_DEPTH PORT   RC queue pairs in RTS, receives posted, a message over
 *                                                          the first and the last of them checked
 *     memory COUNT RECV_DEPTH RECV_SIZE SEND_DEPTH PORT    the same twice; the answer is that of the second time
 *     close                                                ibv_destroy_qp of each
 *
 * Both sides are told the same; the listening one says first at which port it waits, and PORT is 0 for it. All queue
 * pairs of one "connect" share a protection domain, a completion queue and one registered memory.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MESSAGE = 64, MOST = 1 << 16, LOTS = 64 };
struct end { uint32_t qp_num, psn; };
struct lot { struct ibv_cq *cq; struct ibv_mr *mr; char *memory; size_t length; };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_qp *qps[MOST];
static struct lot lots[LOTS]; /* what the queue pairs of each "connect" share */
static int made, taken, gid_index, listens, listener = -1;
static union ibv_gid gid;
static enum ibv_mtu mtu;
static struct sockaddr_in address = {.sin_family = AF_INET};

static void need(int holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "floor: %s: %s\n", what, strerror(errno));
	exit(1);
}

static long now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static long resident(void)
{
	long size, pages;
	FILE *file = fopen("/proc/self/statm", "r");
	need(file && fscanf(file, "%ld %ld", &size, &pages) == 2, "read /proc/self/statm");
	fclose(file);
	return pages * sysconf(_SC_PAGESIZE);
}

static int dial(int port)
{
	int fd, one = 1;
	if (listens) {
		socklen_t length = sizeof(address);
		need(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
		printf("{\"ready\": 1, \"port\": %d}\n", ntohs(address.sin_port));
		need((fd = accept(listener, NULL, NULL)) >= 0, "accept");
	} else {
		address.sin_port = htons(port);
		need((fd = socket(AF_INET, SOCK_STREAM, 0)) >= 0, "socket");
		need(connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0, "connect");
	}
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	return fd;
}

static void swap(int fd, const void *mine, void *theirs, size_t length)
{
	need(send(fd, mine, length, 0) == (ssize_t)length, "send");
	need(recv(fd, theirs, length, MSG_WAITALL) == (ssize_t)length, "recv");
}

static void receive(struct ibv_qp *qp, struct ibv_mr *mr, char *to, int length)
{
	struct ibv_sge sge = {(uintptr_t)to, length, mr->lkey};
	struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1, .wr_id = (uintptr_t)to}, *bad;
	need((errno = ibv_post_recv(qp, &wr, &bad)) == 0, "ibv_post_recv");
}

/* Send one message and take one, over the same queue pair. */
static void prove(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_mr *mr, char *from)
{
	struct ibv_sge sge = {(uintptr_t)from, MESSAGE, mr->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
	memset(from, 0x5a, MESSAGE);
	need((errno = ibv_post_send(qp, &wr, &bad)) == 0, "ibv_post_send");
	for (int left = 2; left > 0;) {
		struct ibv_wc wc;
		if (ibv_poll_cq(cq, 1, &wc) < 1)
			continue;
		need(wc.status == IBV_WC_SUCCESS, ibv_wc_status_str(wc.status));
		if (wc.opcode == IBV_WC_RECV)
			need(memcmp((char *)wc.wr_id, from, MESSAGE) == 0 && wc.byte_len == MESSAGE, "a message came changed");
		left--;
	}
}

static void join(int count, int depth, int size, int send_depth, int port, int quiet)
{
	long before = resident(), mark, verbs = 0, begin = now();
	int fd = dial(port), first = made;
	struct end *mine = calloc(count, sizeof(*mine)), *theirs = calloc(count, sizeof(*theirs));
	union ibv_gid peer;
	char done = 1;

	if (listens)
		begin = now();
	need(mine && theirs && made + count <= MOST && taken < LOTS, "room");
	struct ibv_cq *cq = ibv_create_cq(context, count * (depth + send_depth), NULL, NULL, 0);
	need(cq != NULL, "ibv_create_cq");
	size_t length = (size_t)count * depth * size + MESSAGE;
	char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	need(memory != MAP_FAILED, "mmap");
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, length, IBV_ACCESS_LOCAL_WRITE);
	need(mr != NULL, "ibv_reg_mr");

	mark = now();
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = {
			.max_send_wr = send_depth, .max_recv_wr = depth, .max_send_sge = 1, .max_recv_sge = 1,
			.max_inline_data = MESSAGE, /* as rdmaconnect's: rxe's send queue is twice as large for it */
		},
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
	};
	for (int i = 0; i < count; i++) {
		need((qps[first + i] = ibv_create_qp(pd, &init)) != NULL, "ibv_create_qp");
		mine[i] = (struct end){qps[first + i]->qp_num, random() & 0xffffff};
		need((errno = ibv_modify_qp(qps[first + i], &attr,
			IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS)) == 0, "to INIT");
	}
	verbs += now() - mark;
	for (int i = 0; i < count * depth; i++)
		receive(qps[first + i / depth], mr, memory + (size_t)i * size, size);
	swap(fd, &gid, &peer, sizeof(gid));
	swap(fd, mine, theirs, count * sizeof(*mine));

	mark = now();
	for (int i = 0; i < count; i++) {
		struct ibv_qp_attr rtr = {
			.qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = theirs[i].qp_num, .rq_psn = theirs[i].psn,
			.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
			.ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = peer, .sgid_index = gid_index, .hop_limit = 64}},
		};
		struct ibv_qp_attr rts = {
			.qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 6, .rnr_retry = 7, .sq_psn = mine[i].psn,
			.max_rd_atomic = 1,
		};
		need((errno = ibv_modify_qp(qps[first + i], &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) == 0, "to RTR");
		need((errno = ibv_modify_qp(qps[first + i], &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)) == 0, "to RTS");
	}
	verbs += now() - mark;
	swap(fd, &done, &done, 1);
	long end = now(), after = resident();

	made += count;
	lots[taken++] = (struct lot){cq, mr, memory, length};
	prove(qps[first], cq, mr, memory + length - MESSAGE);
	if (count > 1)
		prove(qps[made - 1], cq, mr, memory + length - MESSAGE);
	swap(fd, &done, &done, 1);
	close(fd);
	free(mine);
	free(theirs);
	if (!quiet)
		printf("{\"begin\": %ld, \"end\": %ld, \"verbs_ns\": %ld, \"rss_before\": %ld, \"rss_after\": %ld, "
			"\"receives\": %d}\n", begin, end, verbs, before, after, depth * size);
}

static void destroy(void)
{
	long begin = now();
	for (int i = 0; i < made; i++)
		need((errno = ibv_destroy_qp(qps[i])) == 0, "ibv_destroy_qp");
	printf("{\"begin\": %ld, \"end\": %ld}\n", begin, now());
	for (made = 0; taken > 0; taken--) {
		struct lot *lot = &lots[taken - 1];
		need((errno = ibv_destroy_cq(lot->cq)) == 0, "ibv_destroy_cq");
		need((errno = ibv_dereg_mr(lot->mr)) == 0, "ibv_dereg_mr");
		munmap(lot->memory, lot->length);
	}
}

int main(int argc, char **argv)
{
	char line[256];
	int n[5], one = 1;
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_port_attr port;

	need(argc == 5, "usage: floor listen|connect DEVICE GID_INDEX ADDRESS");
	setlinebuf(stdout);
	srandom(getpid());
	listens = strcmp(argv[1], "listen") == 0;
	gid_index = atoi(argv[3]);
	need(devices != NULL, "ibv_get_device_list");
	for (int i = 0; devices[i] && !context; i++)
		if (strcmp(ibv_get_device_name(devices[i]), argv[2]) == 0)
			context = ibv_open_device(devices[i]);
	need(context != NULL, argv[2]);
	need((pd = ibv_alloc_pd(context)) != NULL, "ibv_alloc_pd");
	need((errno = ibv_query_port(context, 1, &port)) == 0, "ibv_query_port");
	need(ibv_query_gid(context, 1, gid_index, &gid) == 0, "ibv_query_gid");
	mtu = port.active_mtu;
	need(inet_pton(AF_INET, argv[4], &address.sin_addr) == 1, argv[4]);
	if (listens) {
		need((listener = socket(AF_INET, SOCK_STREAM, 0)) >= 0, "socket");
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		need(bind(listener, (struct sockaddr *)&address, sizeof(address)) == 0, "bind");
		need(listen(listener, 16) == 0, "listen");
	}
	printf("{\"started\": 1}\n");
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "connect %d %d %d %d %d", n, n + 1, n + 2, n + 3, n + 4) == 5)
			join(n[0], n[1], n[2], n[3], n[4], 0);
		else if (sscanf(line, "memory %d %d %d %d %d", n, n + 1, n + 2, n + 3, n + 4) == 5) {
			join(n[0], n[1], n[2], n[3], n[4], 1);
			join(n[0], n[1], n[2], n[3], n[4], 0);
		}
		else if (strncmp(line, "close", 5) == 0)
			destroy();
		else
			need(0, line);
	}
	return 0;
}
