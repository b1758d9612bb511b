/* A child that times its own calls: calls KIND PORT COUNT [FD], where FD says when to begin.
 * "serve" listens once, prints when it did so (CLOCK_MONOTONIC), and stays until it is ended.
 * Prints median, 99th percentile and maximum of a bind with its listen, and the longest single call,
 * in nanoseconds. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
    long x = *(const long *)a, y = *(const long *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    const char *kind = argv[1];
    int count = atoi(argv[3]), i, s;
    long *took = malloc(count * sizeof(long)), begin, middle, longest = 0;
    struct sockaddr_in at;
    char byte;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_port = htons(atoi(argv[2]));
    if (argc > 4 && read(atoi(argv[4]), &byte, 1) != 1)
        return 2;
    if (!strcmp(kind, "serve")) {
        int one = 1;
        s = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(s, (struct sockaddr *)&at, sizeof at) || listen(s, 128))
            return 4;
        begin = now();
        printf("%ld\n", begin);
        fflush(stdout);
        pause();
    }
    for (i = 0; i < count; i++) {
        if (!strcmp(kind, "nothing")) { /* a system call that is neither */
            int j;
            begin = now();
            for (j = 0; j < 1000; j++)
                syscall(SYS_getppid);
            took[i] = (now() - begin) / 1000;
            continue;
        }
        s = socket(AF_INET, SOCK_STREAM, 0);
        begin = now();
        if (bind(s, (struct sockaddr *)&at, sizeof at))
            return 3;
        middle = now();
        if (!strcmp(kind, "listen") && listen(s, 128))
            return 4;
        took[i] = now() - begin;
        longest = middle - begin > longest ? middle - begin : longest;
        longest = begin + took[i] - middle > longest ? begin + took[i] - middle : longest;
        close(s);
    }
    qsort(took, count, sizeof(long), by_size);
    printf("%ld %ld %ld %ld\n", took[count / 2], took[(long)count * 99 / 100], took[count - 1],
           longest);
    fflush(stdout);
    if (argc > 4)
        pause();
    return 0;
}
