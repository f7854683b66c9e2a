/*
 * The public functions of libnrt that the simulator has, in own declarations.
 * Source: AWS's public headers nrt.h, nrt_async.h, nrt_async_sendrecv.h and nrt_experimental.h.
 *
 * The owner of each group is named; nobody else defines them.
 */
#ifndef NRT_FUNCTIONS_H
#define NRT_FUNCTIONS_H

#include "nrt_types.h"

/* lifecycle.c. */
NRT_STATUS nrt_init(nrt_framework_type_t framework, const char *framework_version,
                    const char *fal_version);
void nrt_close(void);
const char *nrt_get_status_as_str(NRT_STATUS status);

/* instance.c. */
NRT_STATUS nrt_get_version(nrt_version_t *version, size_t size);
NRT_STATUS nrt_get_instance_info(nrt_instance_info_t *info, size_t size);
NRT_STATUS nrt_get_total_vnc_count(uint32_t *count);
NRT_STATUS nrt_get_visible_vnc_count(uint32_t *count);
NRT_STATUS nrt_get_total_nc_count(uint32_t *count);
NRT_STATUS nrt_get_visible_nc_count(uint32_t *count);
NRT_STATUS nrt_host_device_id_get(int neuron_device, uint32_t *host_device_id);
NRT_STATUS nrt_host_device_id_rid_map_get(uint32_t *count, uint32_t *host_did_to_rid_map);
NRT_STATUS nrt_get_vnc_memory_stats(uint32_t vnc, nrt_vnc_memory_stats_t *stats, size_t size_in,
                                    size_t *size_out);
NRT_STATUS nrt_get_hbm_mmap_va(int device_id, int hbm_index, void **address, size_t *size);
#if SIM_API >= 3
NRT_STATUS nrt_get_attached_efa_bdf(const void *va, char *efa_bdf, size_t *length);
#endif

/* tensors.c. */
NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t placement, int vnc, size_t size,
                               const char *name, nrt_tensor_t **tensor);
void nrt_tensor_free(nrt_tensor_t **tensor);
NRT_STATUS nrt_tensor_read(const nrt_tensor_t *tensor, void *buffer, size_t offset, size_t size);
NRT_STATUS nrt_tensor_write(nrt_tensor_t *tensor, const void *buffer, size_t offset, size_t size);
NRT_STATUS nrt_tensor_read_batch(const nrt_tensor_batch_t *batches, uint64_t num_batches,
                                 bool unsafe);
NRT_STATUS nrt_tensor_write_batch(const nrt_tensor_batch_t *batches, uint64_t num_batches,
                                  bool unsafe);
NRT_STATUS nrt_tensor_copy(const nrt_tensor_t *source, size_t source_offset,
                           nrt_tensor_t *destination, size_t destination_offset, size_t size);
NRT_STATUS nrt_tensor_memset(nrt_tensor_t *tensor, uint64_t offset, int value, size_t size);
size_t nrt_tensor_get_size(const nrt_tensor_t *tensor);
NRT_STATUS nrt_tensor_allocate_empty(const char *name, nrt_tensor_t **tensor);
NRT_STATUS nrt_tensor_attach_buffer(nrt_tensor_t *tensor, void *buffer, size_t size);
NRT_STATUS nrt_tensor_allocate_slice(const nrt_tensor_t *source, size_t offset, size_t size,
                                     const char *name, nrt_tensor_t **slice);
void *nrt_tensor_get_va(const nrt_tensor_t *tensor);
NRT_STATUS nrt_tensor_get_device_allocation_info(const nrt_tensor_t *tensor,
                                                 nrt_tensor_device_allocation_info_t *info);
NRT_STATUS nrt_tensor_check_output_completion(const nrt_tensor_t *tensor, int64_t timeout,
                                              uint64_t expected_completion_count);
NRT_STATUS nrt_tensor_reset_output_completion(nrt_tensor_t *tensor);
NRT_STATUS nrt_get_dmabuf_fd(uint64_t va, uint64_t size, int *fd);
NRT_STATUS nrt_memcpy_to_device(void *destination, const void *source, size_t size);

/* models.c. */
NRT_STATUS nrt_load(const void *neff, size_t size, int32_t vnc, int32_t vnc_count,
                    nrt_model_t **model);
NRT_STATUS nrt_load_collectives(const void *neff, size_t size, int32_t vnc, int32_t vnc_count,
                                uint32_t ctx_device_id, uint32_t ctx_device_count,
                                nrt_model_t **model);
NRT_STATUS nrt_unload(nrt_model_t *model);
NRT_STATUS nrt_get_model_vnc_count(const nrt_model_t *model, uint32_t *vnc_count);
NRT_STATUS nrt_allocate_tensor_set(nrt_tensor_set_t **set);
void nrt_destroy_tensor_set(nrt_tensor_set_t **set);
NRT_STATUS nrt_add_tensor_to_tensor_set(nrt_tensor_set_t *set, const char *name,
                                        nrt_tensor_t *tensor);
NRT_STATUS nrt_get_tensor_from_tensor_set(nrt_tensor_set_t *set, const char *name,
                                          nrt_tensor_t **tensor);
NRT_STATUS nrt_execute(nrt_model_t *model, const nrt_tensor_set_t *inputs,
                       nrt_tensor_set_t *outputs);
NRT_STATUS nrt_execute_repeat(nrt_model_t *model, const nrt_tensor_set_t *inputs,
                              nrt_tensor_set_t *outputs, int repeat);
NRT_STATUS nrt_get_model_tensor_info(nrt_model_t *model, nrt_tensor_info_array_t **infos);
NRT_STATUS nrt_free_model_tensor_info(nrt_tensor_info_array_t *infos);

/* collectives that need no model: lifecycle.c. */
NRT_STATUS nrt_build_global_comm(int32_t vnc, uint32_t g_device_id, uint32_t g_device_count);
NRT_STATUS nrt_cc_global_comm_init(uint32_t vnc, uint32_t g_device_id, uint32_t g_device_count);
NRT_STATUS nrt_barrier(int32_t vnc, uint32_t g_device_id, uint32_t g_device_count);
void *nrt_get_libnccl_net(int *error, char *message, size_t message_size);

/* queues.c. In API 2 the `result` argument is an error tracker, and these name no core. */
#if SIM_API == 2
#define SIM_LNC_ARGUMENT
#else
#define SIM_LNC_ARGUMENT int lnc,
#endif
NRT_STATUS nrta_tensor_write(nrt_tensor_t *tensor, const void *buffer, uint64_t offset,
                             uint64_t size, SIM_LNC_ARGUMENT int queue, sim_result_t *result,
                             nrta_seq_t *sequence);
NRT_STATUS nrta_tensor_read(void *buffer, nrt_tensor_t *tensor, uint64_t offset, uint64_t size,
                            SIM_LNC_ARGUMENT int queue, sim_result_t *result,
                            nrta_seq_t *sequence);
NRT_STATUS nrta_tensor_copy(nrt_tensor_t *source, uint64_t source_offset,
                            nrt_tensor_t *destination, uint64_t destination_offset, uint64_t size,
                            SIM_LNC_ARGUMENT int queue, sim_result_t *result,
                            nrta_seq_t *sequence);
NRT_STATUS nrta_execute_schedule(nrt_model_t *model, const nrt_tensor_set_t *inputs,
                                 nrt_tensor_set_t *outputs, int queue, sim_result_t *result,
                                 nrta_seq_t *sequence);
NRT_STATUS nrta_cc_prepare(nrt_cc_comm_t *communicator, nrt_tensor_list_t *inputs,
                           nrt_tensor_list_t *outputs, nrt_dtype_t dtype, nrt_op_type_t operation,
                           nrt_cc_op_type_t collective, nrt_cc_context_t **context);
NRT_STATUS nrta_cc_schedule(nrt_cc_context_t **context, int queue, sim_result_t *result,
                            nrta_seq_t *sequence);
NRT_STATUS nrta_is_completed(nrta_seq_t sequence, bool *is_completed);
NRT_STATUS nrta_get_sequence(uint32_t lnc, nrta_xu_t unit, int queue, nrta_seq_t *sequence);
#if SIM_API == 2
NRT_STATUS nrta_get_completion_handle(nrta_seq_t sequence, int *fd);
NRT_STATUS nrta_error_tracker_create(uint32_t lnc, nrta_error_tracker_t **tracker);
void nrta_error_tracker_destroy(nrta_error_tracker_t *tracker);
NRT_STATUS nrta_error_tracker_get_list(nrta_error_tracker_t *tracker, const nrta_error_t **errors,
                                       size_t *num_errors);
#else
/* SDK 2.30 and later; a negative fd takes the registration back. */
NRT_STATUS nrta_event_register_seq_id_completion(nrta_seq_t sequence, int fd);
NRT_STATUS nrta_event_register_xu_completion(int lnc, nrta_xu_t unit, int queue, int fd);
#endif

/* sendrecv.c. An lnc is a number of the host (absolute), a vnc one of the process. */
NRT_STATUS nrt_async_sendrecv_get_max_num_communicators_per_lnc(int *number);
NRT_STATUS nrt_async_sendrecv_get_max_num_pending_request(int *number);
NRT_STATUS nrt_async_sendrecv_init(int lnc);
NRT_STATUS nrt_async_sendrecv_close(int lnc);
NRT_STATUS nrt_async_sendrecv_connect(const char *peer_ip, int peer_lnc, int lnc,
                                      nrt_async_sendrecv_comm_t **communicator);
NRT_STATUS nrt_async_sendrecv_accept(const char *peer_ip, int peer_lnc, int lnc,
                                     nrt_async_sendrecv_comm_t **communicator);
NRT_STATUS nrt_async_sendrecv_test_comm(nrt_async_sendrecv_comm_t *communicator, bool *done);
NRT_STATUS nrt_async_sendrecv_send_tensor(nrt_tensor_t *tensor, size_t offset, size_t length,
                                          nrt_async_sendrecv_comm_t *communicator,
                                          nrt_async_sendrecv_request_t **request);
NRT_STATUS nrt_async_sendrecv_recv_tensor(nrt_tensor_t *tensor, size_t offset, size_t length,
                                          nrt_async_sendrecv_comm_t *communicator,
                                          nrt_async_sendrecv_request_t **request);
NRT_STATUS nrt_async_sendrecv_test_request(nrt_async_sendrecv_request_t *request, bool *done,
                                           size_t *size);
NRT_STATUS nrt_async_sendrecv_flush(int lnc);

#endif
