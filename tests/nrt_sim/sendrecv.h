/*
 * Async send/receive between processes: what its files share.
 *
 *     sendrecv.c          the public functions and their rules
 *     sendrecv_post.c     requests: posting, testing, flush
 *     sendrecv_link.c     a socket with frames, and who listens where
 *     sendrecv_pair.c     how two communicators become a pair, and what ends one
 *     sendrecv_service.c  the one thread of a process that does the above and moves bytes
 *
 * Behaviour as nrt_async_sendrecv.h says. All state is under one lock, sendrecv_lock(); it is held
 * while a socket takes or gives some 100 KB, never while something waits. Communicators live until
 * nrt_close, so the service thread may keep addresses of them while it waits.
 *
 * How a message goes: the sender announces (number, bytes); the receiver answers CLEAR when its
 * receive of that number is posted and as long, or MISMATCH; the sender sends the bytes straight
 * from the tensor's memory; the receiver keeps them aside until flush and says RECEIVED.
 */
#ifndef SENDRECV_H
#define SENDRECV_H

#include <netinet/in.h>

#include "sim.h"

/* ---- Links (sendrecv_link.c) ------------------------------------------------------ */

enum frame_kind {
    FRAME_HELLO = 1, /* sender: whom it wants; a struct hello follows */
    FRAME_WELCOME,   /* receiver: the two are a pair */
    FRAME_ANNOUNCE,  /* sender: a send of this number and length is posted */
    FRAME_CLEAR,     /* receiver: the receive is posted, too */
    FRAME_MISMATCH,  /* receiver: it is, with another length */
    FRAME_PAYLOAD,   /* sender: the bytes follow */
    FRAME_RECEIVED,  /* receiver: they are all here */
    FRAME_ABORTED,   /* either: this request failed here */
};

struct frame {
    uint32_t magic;
    uint32_t kind;
    uint64_t number; /* of the request, counted from 0 on each communicator */
    uint64_t num_bytes;
};

struct hello {
    int32_t lnc; /* of the sender */
    char address[INET6_ADDRSTRLEN];
};

/* A connected socket that never blocks. */
struct link {
    int fd; /* -1: none */
    struct frame frame; /* the newest that came, maybe in part */
    size_t num_frame_bytes;
    unsigned char *into; /* where the body of that frame goes */
    uint64_t into_left;
    unsigned char *control; /* frames to be written */
    size_t num_control, control_capacity;
    const unsigned char *from; /* a body to be written after the first `num_before` of these */
    uint64_t from_left;
    size_t num_before;
};

enum link_event {
    LINK_QUIET, /* nothing to read now */
    LINK_MORE,  /* a part came */
    LINK_FRAME, /* a frame came whole; its reader sets `into` when a body follows */
    LINK_BODY,  /* its body came whole */
    LINK_GONE,
};

void link_open(struct link *link, int fd);
void link_close(struct link *link);
bool link_is_cut(const struct link *link); /* the peer closed it, whatever is still to be read */
void link_put(struct link *link, enum frame_kind kind, uint64_t number, uint64_t num_bytes);
void link_put_hello(struct link *link, const struct hello *hello);
/* The bytes must stay until link_is_sending() is false. */
void link_put_body(struct link *link, uint64_t number, const unsigned char *from, uint64_t size);
bool link_is_sending(const struct link *link);
bool link_has_control(const struct link *link); /* frames that could be written now */
/* Writes what the socket takes, of bodies at most *allowance bytes, which it lowers. */
void link_write(struct link *link, uint64_t *allowance);
/* Writes all frames, for at most some seconds: before a link is closed in good order. */
void link_drain(struct link *link);
enum link_event link_read(struct link *link);

/* The one spelling of an address; false when it is none. */
bool canonical_address(const char *address, char canonical[INET6_ADDRSTRLEN]);
/* Sockets are root/hosts/<address>/sendrecv/<port>-<lnc>. -1 when it cannot be. */
int listen_for(int lnc, int port);
void stop_listening(int fd, int lnc, int port);
int dial(const char *address, int lnc, int port);
/* The lock file of the rendezvous; false, with a line on stderr, when it cannot be had in time. */
bool take_bootstrap_lock(int *fd);
void give_bootstrap_lock(int fd);

/* ---- Communicators and requests --------------------------------------------------- */

enum request_state { REQUEST_POSTED, REQUEST_CLEARED, REQUEST_DONE };

struct request {
    struct communicator *communicator;
    struct request *next; /* of the communicator's, in the order of posting */
    nrt_async_sendrecv_request_t *handle;
    unsigned char *memory; /* of a tensor, which its communicator holds */
    unsigned char *shadow; /* of a receive: the bytes before flush */
    uint64_t num_bytes, number;
    enum request_state state;
    NRT_STATUS status; /* of a done one */
    bool is_started;   /* a send whose bytes are on their way, or are stuck for good */
    bool is_being_tested;
};

enum communicator_state { WAITING, PAIRED, LOST, ENDED };

struct announcement { /* of a send whose receive is not posted yet */
    uint64_t number, num_bytes;
};

struct communicator {
    struct lnc_state *lnc;
    struct communicator *next; /* of the lnc */
    nrt_async_sendrecv_comm_t *handle;
    bool is_sender;
    char peer_address[INET6_ADDRSTRLEN];
    int peer_lnc;
    enum communicator_state state;
    bool is_tested;    /* test_comm said connected */
    uint64_t ready_us; /* of a pair: when it counts as connected */
    uint64_t redial_us, redial_wait_us;
    struct link link;
    struct request *first, *last; /* not tested done yet */
    uint32_t num_in_flight;
    uint64_t num_posted;
    struct announcement *announced;
    size_t num_announced, announced_capacity;
    struct sim_tensor **registered; /* held, and in flight, until the communicator ends */
    size_t num_registered, registered_capacity;
};

struct guest { /* a sender's socket before its communicator is known */
    struct guest *next;
    struct link link;
    struct hello hello;
    bool is_known; /* its hello is here */
    int opening;   /* which opening of the lnc it came to */
};

enum lnc_phase { LNC_UNOPENED, LNC_OPENING, LNC_OPEN, LNC_BROKEN };

struct lnc_state {
    int lnc;
    enum lnc_phase phase; /* BROKEN after a failed close, until the process ends */
    int port, listen_fd;
    int num_openings;
    struct communicator *first, *last; /* ENDED ones, too */
    int num_communicators;             /* ever made: a communicator cannot be destroyed */
    struct guest *guests;              /* the service thread's alone */
    struct request *landed, *last_landed; /* receives tested done, before flush */
    double allowance;                     /* bytes that may leave now */
    uint64_t allowance_us;
    uint64_t num_bytes_sent;
};

struct sendrecv_settings { /* read at nrt_init */
    uint32_t communicators_max, pending_max;
    uint64_t connect_delay_us, bytes_per_s; /* 0 bytes: no limit */
    uint64_t lock_wait_us;
};

extern struct sendrecv_settings sendrecv_settings;
void sendrecv_lock(void);
void sendrecv_unlock(void);
/* State of a lnc, 0 to SIM_CORES_MAX - 1. The lock is held for all that follow. */
struct lnc_state *sendrecv_lnc(int lnc);
/* The same of an open one of this process, else NULL and the status to return. */
struct lnc_state *open_lnc(int lnc, NRT_STATUS *status);
bool communicator_is_connected(const struct communicator *communicator);
/* Forgets a request: its handle ends, bytes that came do not count. */
void request_end(struct request *request);
/* The one that is not tested done yet, or NULL. */
struct request *request_numbered(const struct communicator *communicator, uint64_t number);
void request_finish(struct request *request, NRT_STATUS status);
/* Of a receive and a send of one number one came later: CLEAR, or both fail. */
void request_meet(struct request *receive, uint64_t num_bytes);
/* Ends links, handles, registrations; the object stays until nrt_close. */
void communicator_end(struct communicator *communicator);
void lnc_forget_landed(struct lnc_state *lnc);

/* ---- Pairing (sendrecv_pair.c): for the service thread ---------------------------- */

void guests_welcome(struct lnc_state *lnc); /* its socket has some */
/* Those of an lnc that was closed since, and all in the end, are sent away. */
void guests_look_after(struct lnc_state *lnc, bool is_stopping);
void guest_read(struct lnc_state *lnc, struct guest *guest);
void guest_drop(struct lnc_state *lnc, struct guest *guest);
void communicator_find_guest(struct communicator *receiver);
void communicator_dial(struct communicator *sender); /* when it is time */
void communicator_pair(struct communicator *communicator);
void communicator_lose(struct communicator *communicator); /* its link is gone or makes no sense */

/* ---- The service thread (sendrecv_service.c) -------------------------------------- */

bool service_start(void); /* once; true when it runs */
void service_stop(void);  /* waits for its end; the lock is not held */
void service_wake(void);
/*
 * A point of faults of the service thread. A fault may sleep, so the lock is not held meanwhile:
 * what is in flight cannot be freed, all else may have changed.
 */
NRT_STATUS service_pass(const char *point, const struct lnc_state *lnc);

/* ---- For tests: exported ------------------------------------------------------------ */

/* Bytes of messages that left an lnc of this process so far. */
uint64_t nrt_sim_bytes_sent(int lnc);

#endif
