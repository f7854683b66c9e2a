"""What a transfer of GPU memory is compared with: a copy within the GPU."""

from neuron_di.errors import ConfigError
from neuron_di.kv.device_pool import DevicePool
from neuron_di.transfer_bench.plain_copy import RegionCopy
from neuron_di.transfer_bench.pool_bytes import device_errors
from neuron_di_bindings.cuda_runtime import CudaError


class DeviceCopy(RegionCopy):
    """Two regions on a pool's device, and a stream. Owns them until close()."""

    def __init__(self, pool: DevicePool, region_bytes: int) -> None:
        """ConfigError where the device has no room for them."""
        super().__init__(region_bytes)
        self._runtime = runtime = pool.runtime
        self._device = pool.device
        self._addresses: list[int] = []
        self._stream = 0
        try:
            with runtime.on_device(self._device):
                self._stream = runtime.create_stream()
                for _ in range(2):
                    self._addresses.append(runtime.allocate(region_bytes))
                    runtime.fill(self._addresses[-1], 1, region_bytes, self._stream)
                runtime.synchronize(self._stream)
        except CudaError as error:
            self.close()
            raise ConfigError(f"cannot copy {region_bytes} bytes on the GPU: {error}") from None

    def close(self) -> None:
        with device_errors(), self._runtime.on_device(self._device):
            while self._addresses:
                self._runtime.free(self._addresses.pop())
            stream, self._stream = self._stream, 0
            if stream:
                self._runtime.destroy_stream(stream)

    def _copy(self, offset: int, num_bytes: int) -> None:
        source, destination = self._addresses
        with device_errors(), self._runtime.on_device(self._device):
            self._runtime.copy(destination + offset, source + offset, num_bytes, self._stream)

    def _wait(self) -> None:
        with device_errors():
            self._runtime.synchronize(self._stream)
