/* Frames as lines of hexadecimal in; out the type of each, and how a C program writes the same message.
 * cc read.c -o read -lmsgpackc        (-lmsgpack-c since msgpack-c 6)
 */
#include "messages.h"

int main(void)
{
	static char line[2 * MAX_FRAME + 2];
	static uint8_t raw[MAX_FRAME];
	static struct message m;
	msgpack_sbuffer_init(&frame);
	while (fgets(line, sizeof line, stdin)) {
		size_t size = strcspn(line, "\n") / 2;
		for (size_t i = 0; i < size; i++)
			if (sscanf(line + 2 * i, "%2hhx", raw + i) != 1)
				die("a line is no hexadecimal");
		read_message(raw, size, &m);
		write_message(&m);
		printf("%s ", m.type);
		for (size_t i = 0; i < frame.size; i++)
			printf("%02x", (uint8_t)frame.data[i]);
		printf("\n");
	}
	return 0;
}
