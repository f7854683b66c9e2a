/*
 * How two communicators become a pair, and what ends one. See sendrecv.h.
 *
 * The sender dials the socket of its peer's lnc, again and again until there is one, and says who
 * it is. There it is a guest until a communicator accepts exactly this sender. So a pair needs
 * both ends, each with the other's address and absolute lnc; any other call waits for ever. Only
 * the service thread comes here.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sendrecv.h"

enum { GUESTS_MAX = 1024, REDIAL_FIRST_US = 2000, REDIAL_LAST_US = 50000 };

void guest_drop(struct lnc_state *lnc, struct guest *guest)
{
    struct guest **place = &lnc->guests;
    while (*place != guest)
        place = &(*place)->next;
    *place = guest->next;
    link_close(&guest->link);
    free(guest);
}

void guests_look_after(struct lnc_state *lnc, bool is_stopping)
{
    struct guest *next;
    for (struct guest *one = lnc->guests; one != NULL; one = next) {
        next = one->next;
        bool is_late = one->opening != lnc->num_openings || lnc->phase == LNC_UNOPENED;
        if (is_late || is_stopping)
            guest_drop(lnc, one);
    }
}

void guests_welcome(struct lnc_state *lnc)
{
    size_t num_guests = 0;
    for (const struct guest *one = lnc->guests; one != NULL; one = one->next)
        num_guests++;
    for (; num_guests < GUESTS_MAX; num_guests++) {
        int fd = accept4(lnc->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        struct guest *guest = fd < 0 ? NULL : calloc(1, sizeof(*guest));
        if (guest == NULL) {
            if (fd >= 0)
                close(fd);
            return;
        }
        link_open(&guest->link, fd);
        guest->opening = lnc->num_openings;
        guest->next = lnc->guests;
        lnc->guests = guest;
    }
}

/* A guest says hello and then nothing until it is welcome. */
void guest_read(struct lnc_state *lnc, struct guest *guest)
{
    for (;;) {
        enum link_event event = link_read(&guest->link);
        const struct frame *frame = &guest->link.frame;
        if (event == LINK_QUIET)
            return;
        bool is_hello = event == LINK_FRAME && frame->kind == FRAME_HELLO &&
                        frame->num_bytes == sizeof(guest->hello);
        if (guest->is_known || event == LINK_GONE || (event == LINK_FRAME && !is_hello)) {
            guest_drop(lnc, guest);
            return;
        }
        if (is_hello) {
            guest->link.into = (unsigned char *)&guest->hello;
            guest->link.into_left = sizeof(guest->hello);
        }
        if (event == LINK_BODY) {
            guest->hello.address[sizeof(guest->hello.address) - 1] = '\0';
            guest->is_known = true;
            if (service_pass("sendrecv.guest", lnc) != NRT_SUCCESS) {
                guest_drop(lnc, guest);
                return;
            }
        }
    }
}

void communicator_pair(struct communicator *communicator)
{
    communicator->state = PAIRED;
    communicator->ready_us = sim_now_us() + sendrecv_settings.connect_delay_us;
    sim_trace_event("paired", ", \"communicator\": %lld", sim_handle_number(communicator->handle));
}

void communicator_find_guest(struct communicator *receiver)
{
    struct guest *guest = receiver->lnc->guests;
    while (guest != NULL && !(guest->is_known && guest->hello.lnc == receiver->peer_lnc &&
                              strcmp(guest->hello.address, receiver->peer_address) == 0))
        guest = guest->next;
    if (guest == NULL)
        return;
    receiver->link = guest->link;
    link_open(&guest->link, -1); /* moved */
    guest_drop(receiver->lnc, guest);
    link_put(&receiver->link, FRAME_WELCOME, 0, 0);
    communicator_pair(receiver);
}

void communicator_dial(struct communicator *sender)
{
    if (sim_now_us() < sender->redial_us)
        return;
    int fd = dial(sender->peer_address, sender->peer_lnc, sender->lnc->port);
    if (fd < 0) {
        uint64_t wait_us = 2 * sender->redial_wait_us;
        wait_us = wait_us < REDIAL_FIRST_US ? REDIAL_FIRST_US : wait_us;
        sender->redial_wait_us = wait_us > REDIAL_LAST_US ? REDIAL_LAST_US : wait_us;
        sender->redial_us = sim_now_us() + sender->redial_wait_us;
        return;
    }
    struct hello hello = {.lnc = sender->lnc->lnc};
    canonical_address(sim_host_address(), hello.address);
    link_open(&sender->link, fd);
    link_put_hello(&sender->link, &hello);
}

void communicator_lose(struct communicator *communicator)
{
    link_close(&communicator->link);
    if (communicator->state == WAITING) { /* the peer went before they were a pair: once more */
        communicator->redial_us = sim_now_us() + REDIAL_FIRST_US;
        return;
    }
    communicator->state = LOST;
    sim_trace_event("lost", ", \"communicator\": %lld", sim_handle_number(communicator->handle));
}
