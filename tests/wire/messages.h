/* The messages of docs/wire.md in C, with msgpack-c: what comes is read with distrust, what goes is written in order. */
#include <msgpack.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VERSION = 1, MAX_FRAME = 512 * 1024, GIDS = 256, PKEYS = 256, REGIONS = 4 };

static void die(const char *words, ...)
{
	va_list list;
	va_start(list, words);
	vfprintf(stderr, words, list);
	fprintf(stderr, "\n");
	exit(1);
}

/* ---- messages as values: what this peer uses of them, and so can write again */

struct gid { uint8_t raw[16]; unsigned type, index; char netdev[256]; };
struct port {
	char dev[256];
	unsigned num, ll, lid, mtu, grh, ord, ird, msz, npkeys, ngids, pkeys[PKEYS];
	struct gid gids[GIDS];
};
struct region { char name[1025]; uint64_t addr, length, rkey; };
struct message {
	char type[16], stage[257], why[8193];
	uint8_t id[16], prev[16], token[16], data[4096];
	unsigned qpt, qpn, psn, qkey, rsz, ndata, nregions, has_prev, has_token, meet, beat, patience, ask, lost, error, again;
	struct port port;
	struct region regions[REGIONS];
	struct { unsigned mtu, sl, tc, fl, pkey, has_pkey, probe; } wish;
	struct { unsigned has_gids, mtu, sl, tc, fl, pkey, unproven; struct gid cg, lg; } agree;
};

/* ---- reading; nothing that comes is trusted */

typedef const msgpack_object object;

static object *find(object *map, const char *key)
{
	for (uint32_t i = 0; map->type == MSGPACK_OBJECT_MAP && i < map->via.map.size; i++) {
		object *k = &map->via.map.ptr[i].key;
		if (k->type == MSGPACK_OBJECT_STR && k->via.str.size == strlen(key) && !memcmp(k->via.str.ptr, key, strlen(key)))
			return &map->via.map.ptr[i].val;
	}
	return NULL;
}

static object *need(object *map, const char *key, msgpack_object_type type)
{
	object *found = find(map, key);
	if (!found || found->type != type)
		die("%s is missing or of another type", key);
	return found;
}

static uint64_t number(object *o, const char *key, uint64_t least, uint64_t most)
{
	if (!o || o->type != MSGPACK_OBJECT_POSITIVE_INTEGER || o->via.u64 < least || o->via.u64 > most)
		die("%s is no number from %llu to %llu", key, (unsigned long long)least, (unsigned long long)most);
	return o->via.u64;
}

static uint64_t get_int(object *map, const char *key, uint64_t least, uint64_t most)
{
	return number(find(map, key), key, least, most);
}

static uint64_t given(object *map, const char *key, uint64_t least, uint64_t most)
{
	return find(map, key) ? get_int(map, key, least, most) : 0;
}

static int flag(object *map, const char *key)
{
	return find(map, key) && need(map, key, MSGPACK_OBJECT_BOOLEAN)->via.boolean;
}

static void text(object *o, const char *key, char *into, size_t room)
{
	if (!o || o->type != MSGPACK_OBJECT_STR || o->via.str.size >= room)
		die("%s is no text of at most %zu bytes", key, room - 1);
	memcpy(into, o->via.str.ptr, o->via.str.size);
	into[o->via.str.size] = 0;
}

static unsigned bytes(object *o, const char *key, void *into, size_t least, size_t most)
{
	if (!o || o->type != MSGPACK_OBJECT_BIN || o->via.bin.size < least || o->via.bin.size > most)
		die("%s is not %zu to %zu bytes", key, least, most);
	memcpy(into, o->via.bin.ptr, o->via.bin.size);
	return o->via.bin.size;
}

static object *array(object *o, const char *key, size_t least, size_t most)
{
	if (!o || o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size < least || o->via.array.size > most)
		die("%s is no array of %zu to %zu", key, least, most);
	return o->via.array.ptr;
}

static void get_gid(object *o, struct gid *gid)
{
	object *row = array(o, "a GID", 4, SIZE_MAX);
	bytes(row, "gid", gid->raw, 16, 16);
	gid->type = number(row + 1, "gid_type", 0, 255);
	gid->index = number(row + 2, "gid_index", 0, 255);
	text(row + 3, "netdev", gid->netdev, sizeof gid->netdev);
}

static void get_port(object *map, struct port *port)
{
	text(find(map, "dev"), "dev", port->dev, sizeof port->dev);
	port->num = get_int(map, "num", 1, 254);
	port->ll = get_int(map, "ll", 0, 255);
	port->lid = get_int(map, "lid", 0, 65535);
	port->mtu = get_int(map, "mtu", 1, 5);
	port->grh = need(map, "grh", MSGPACK_OBJECT_BOOLEAN)->via.boolean;
	port->ord = get_int(map, "ord", 0, 255);
	port->ird = get_int(map, "ird", 0, 255);
	port->msz = given(map, "msz", 0, UINT32_MAX);
	object *rows = array(find(map, "pkeys"), "pkeys", 0, PKEYS);
	port->npkeys = find(map, "pkeys")->via.array.size;
	for (unsigned i = 0; i < port->npkeys; i++)
		port->pkeys[i] = number(rows + i, "pkey", 0, 65535);
	rows = array(find(map, "gids"), "gids", 0, GIDS);
	port->ngids = find(map, "gids")->via.array.size;
	for (unsigned i = 0; i < port->ngids; i++)
		get_gid(rows + i, &port->gids[i]);
}

static void get_side(object *map, struct message *m)
{
	m->qpt = get_int(map, "qpt", 0, 255);
	object *row = array(array(find(map, "qps"), "qps", 1, 4096), "a queue pair", 3, SIZE_MAX);
	m->qpn = number(row, "qp_num", 1, 0xffffff);
	m->psn = number(row + 1, "psn", 0, 0xffffff);
	m->qkey = number(row + 2, "qkey", 0, UINT32_MAX);
	get_port(need(map, "port", MSGPACK_OBJECT_MAP), &m->port);
	m->rsz = get_int(map, "rsz", 0, 1u << 31);
	object *mem = need(map, "mem", MSGPACK_OBJECT_MAP);
	m->nregions = mem->via.map.size < REGIONS ? mem->via.map.size : REGIONS;
	for (unsigned i = 0; i < m->nregions; i++) {
		struct region *r = &m->regions[i];
		text(&mem->via.map.ptr[i].key, "a name", r->name, sizeof r->name);
		row = array(&mem->via.map.ptr[i].val, "a region", 3, SIZE_MAX);
		r->addr = number(row, "addr", 0, UINT64_MAX);
		r->length = number(row + 1, "length", 0, UINT64_MAX);
		r->rkey = number(row + 2, "rkey", 0, UINT32_MAX);
	}
	m->ndata = bytes(find(map, "data"), "data", m->data, 0, sizeof m->data);
}

static void get_hello(object *map, struct message *m)
{
	object *wish = need(map, "wish", MSGPACK_OBJECT_MAP), *prev = find(map, "prev"), *pkey = find(wish, "pkey");
	get_side(map, m);
	m->wish.mtu = get_int(wish, "mtu", 1, 5);
	m->wish.sl = get_int(wish, "sl", 0, 15);
	m->wish.tc = get_int(wish, "tc", 0, 255);
	m->wish.fl = get_int(wish, "fl", 0, 0xfffff);
	m->wish.has_pkey = pkey && pkey->type != MSGPACK_OBJECT_NIL;
	m->wish.pkey = m->wish.has_pkey ? number(pkey, "pkey", 1, 65535) : 0;
	m->wish.probe = need(wish, "probe", MSGPACK_OBJECT_BOOLEAN)->via.boolean;
	m->has_prev = prev && prev->type != MSGPACK_OBJECT_NIL && bytes(prev, "prev", m->prev, 16, 16);
	m->meet = need(map, "meet", MSGPACK_OBJECT_BOOLEAN)->via.boolean;
	m->patience = given(map, "patience", 0, INT32_MAX);
	m->beat = given(map, "beat", 100, 60000);
}

static void get_reply(object *map, struct message *m)
{
	object *agree = need(map, "agree", MSGPACK_OBJECT_MAP), *cg = find(agree, "cg"), *lg = find(agree, "lg");
	get_side(map, m);
	if (!cg || !lg || (cg->type == MSGPACK_OBJECT_NIL) != (lg->type == MSGPACK_OBJECT_NIL))
		die("agree has not two GIDs, or none");
	m->agree.has_gids = cg->type != MSGPACK_OBJECT_NIL;
	if (m->agree.has_gids)
		get_gid(cg, &m->agree.cg), get_gid(lg, &m->agree.lg);
	m->agree.mtu = get_int(agree, "mtu", 1, 5);
	m->agree.sl = get_int(agree, "sl", 0, 15);
	m->agree.tc = get_int(agree, "tc", 0, 255);
	m->agree.fl = get_int(agree, "fl", 0, 0xfffff);
	m->agree.pkey = get_int(agree, "pkey", 1, 0x7fff);
	m->agree.unproven = find(agree, "probe") && !flag(agree, "probe");
	array(find(map, "ports"), "ports", 0, 16);
	m->has_token = find(map, "token") && bytes(find(map, "token"), "token", m->token, 16, 16);
	m->beat = given(map, "beat", 100, 60000);
}

/* A message out of a frame; one of a type that this peer does not use has only that and its id. */
static void read_message(const void *frame, size_t size, struct message *m)
{
	msgpack_unpacked whole;
	size_t at = 0;
	memset(m, 0, sizeof *m);
	msgpack_unpacked_init(&whole);
	if (size > MAX_FRAME || msgpack_unpack_next(&whole, frame, size, &at) != MSGPACK_UNPACK_SUCCESS || at != size)
		die("%zu bytes are not one MessagePack value", size);
	object *map = &whole.data;
	if (get_int(map, "v", 0, UINT64_MAX) != VERSION)
		die("the peer speaks another version");
	text(find(map, "t"), "t", m->type, sizeof m->type);
	bytes(find(map, "id"), "id", m->id, 16, 16);
	if (!strcmp(m->type, "hello"))
		get_hello(map, m);
	else if (!strcmp(m->type, "reply"))
		get_reply(map, m);
	else if (!strcmp(m->type, "beat"))
		m->ask = flag(map, "ask");
	else if (!strcmp(m->type, "resume"))
		m->has_token = !!bytes(find(map, "token"), "token", m->token, 16, 16);
	else if (!strcmp(m->type, "bye"))
		text(find(map, "why"), "why", m->why, sizeof m->why), m->lost = flag(map, "lost");
	else if (!strcmp(m->type, "reject")) {
		text(find(map, "stage"), "stage", m->stage, sizeof m->stage);
		text(find(map, "why"), "why", m->why, sizeof m->why);
		m->error = get_int(map, "errno", 0, 4095), m->again = given(map, "again", 0, 60000);
		array(find(map, "ports"), "ports", 0, 16);
	}
	msgpack_unpacked_destroy(&whole);
}

/* ---- writing, in the order of the specification; what may be missing and is nothing is left out */

static msgpack_packer out;
static msgpack_sbuffer frame;

static void put_text(const char *s) { msgpack_pack_str(&out, strlen(s)), msgpack_pack_str_body(&out, s, strlen(s)); }
static void put_bin(const void *b, size_t n) { msgpack_pack_bin(&out, n), msgpack_pack_bin_body(&out, b, n); }
static void put_int(const char *key, uint64_t n) { put_text(key), msgpack_pack_uint64(&out, n); }
static void put_bool(const char *key, int on) { put_text(key), on ? msgpack_pack_true(&out) : msgpack_pack_false(&out); }
static void put_str(const char *key, const char *s) { put_text(key), put_text(s); }
static void put_map(const char *key, size_t n) { put_text(key), msgpack_pack_map(&out, n); }
static void put_array(const char *key, size_t n) { put_text(key), msgpack_pack_array(&out, n); }

static void put_gid(const struct gid *gid)
{
	msgpack_pack_array(&out, 4);
	put_bin(gid->raw, 16);
	msgpack_pack_uint32(&out, gid->type), msgpack_pack_uint32(&out, gid->index);
	put_text(gid->netdev);
}

static void put_port(const struct port *port)
{
	msgpack_pack_map(&out, 10 + !!port->msz);
	put_str("dev", port->dev);
	put_int("num", port->num), put_int("ll", port->ll), put_int("lid", port->lid), put_int("mtu", port->mtu);
	put_bool("grh", port->grh);
	put_array("pkeys", port->npkeys);
	for (unsigned i = 0; i < port->npkeys; i++)
		msgpack_pack_uint32(&out, port->pkeys[i]);
	put_int("ord", port->ord), put_int("ird", port->ird);
	put_array("gids", port->ngids);
	for (unsigned i = 0; i < port->ngids; i++)
		put_gid(&port->gids[i]);
	if (port->msz)
		put_int("msz", port->msz);
}

static void put_side(const struct message *m)
{
	put_int("qpt", m->qpt);
	put_array("qps", 1), msgpack_pack_array(&out, 3);
	msgpack_pack_uint32(&out, m->qpn), msgpack_pack_uint32(&out, m->psn), msgpack_pack_uint32(&out, m->qkey);
	put_text("port"), put_port(&m->port);
	put_int("rsz", m->rsz);
	put_map("mem", m->nregions);
	for (unsigned i = 0; i < m->nregions; i++) {
		put_text(m->regions[i].name), msgpack_pack_array(&out, 3);
		msgpack_pack_uint64(&out, m->regions[i].addr), msgpack_pack_uint64(&out, m->regions[i].length);
		msgpack_pack_uint64(&out, m->regions[i].rkey);
	}
	put_text("data"), put_bin(m->data, m->ndata);
}

static void put_hello(const struct message *m)
{
	put_side(m);
	put_map("wish", 6);
	put_int("mtu", m->wish.mtu), put_int("sl", m->wish.sl), put_int("tc", m->wish.tc), put_int("fl", m->wish.fl);
	put_text("pkey"), m->wish.has_pkey ? msgpack_pack_uint32(&out, m->wish.pkey) : msgpack_pack_nil(&out);
	put_bool("probe", m->wish.probe);
	put_text("prev");
	if (m->has_prev)
		put_bin(m->prev, 16);
	else
		msgpack_pack_nil(&out);
	put_text("want"), msgpack_pack_nil(&out);
	put_bool("meet", m->meet);
	if (m->beat)
		put_int("beat", m->beat);
	if (m->patience)
		put_int("patience", m->patience);
}

static void put_reply(const struct message *m)
{
	put_side(m);
	put_map("agree", 7);
	put_text("cg"), m->agree.has_gids ? put_gid(&m->agree.cg) : (void)msgpack_pack_nil(&out);
	put_text("lg"), m->agree.has_gids ? put_gid(&m->agree.lg) : (void)msgpack_pack_nil(&out);
	put_int("mtu", m->agree.mtu), put_int("sl", m->agree.sl), put_int("tc", m->agree.tc), put_int("fl", m->agree.fl);
	put_int("pkey", m->agree.pkey);
	put_array("ports", 0);
	if (m->has_token)
		put_text("token"), put_bin(m->token, 16);
	if (m->beat)
		put_int("beat", m->beat);
}

/* The bytes of a message, in `frame`. */
static void write_message(const struct message *m)
{
	int hello = !strcmp(m->type, "hello"), reply = !strcmp(m->type, "reply"), bye = !strcmp(m->type, "bye");
	int reject = !strcmp(m->type, "reject"), keys = 3 + bye + m->ask + m->lost + m->has_token + !!m->beat + !!m->again;
	msgpack_sbuffer_clear(&frame);
	msgpack_packer_init(&out, &frame, msgpack_sbuffer_write);
	msgpack_pack_map(&out, keys + (hello ? 10 + !!m->patience : reply ? 8 : reject ? 4 : 0));
	put_int("v", VERSION);
	put_str("t", m->type);
	put_text("id"), put_bin(m->id, 16);
	if (hello)
		put_hello(m);
	else if (reply)
		put_reply(m);
	else if (m->ask)
		put_bool("ask", 1);
	else if (m->has_token)
		put_text("token"), put_bin(m->token, 16);
	else if (reject) {
		put_str("stage", m->stage), put_int("errno", m->error), put_str("why", m->why), put_array("ports", 0);
		if (m->again)
			put_int("again", m->again);
	} else if (bye) {
		put_str("why", m->why);
		if (m->lost)
			put_bool("lost", 1);
	}
}
