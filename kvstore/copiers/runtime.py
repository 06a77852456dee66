"""The few calls of the GPU runtime that torch does not offer: strided copies, registering host memory, handles for
other processes. CUDA and HIP name them alike but for the prefix; the library is the one that torch itself has loaded,
because a second one would have a context of its own.
"""

import ctypes
import functools

import torch

HOST_TO_DEVICE = 1
DEVICE_TO_HOST = 2
DEVICE_TO_DEVICE = 3
_REGISTER_PORTABLE = 1
IPC_HANDLE_BYTES = 64
_IPC_LAZY_PEER_ACCESS = 1


class GpuError(RuntimeError):
    """A call of the runtime failed; the message has call, sizes and error number."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class GpuRuntime:
    """Bound by `gpu_runtime`. Every call raises GpuError and leaves no error behind that torch would stumble over."""

    def __init__(self, library: ctypes.CDLL, prefix: str) -> None:
        self._library, self._prefix = library, prefix
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._bind("Memcpy2DAsync", pointer, size, pointer, size, size, size, number, pointer)
        self._bind("HostRegister", pointer, size, ctypes.c_uint)
        self._bind("HostUnregister", pointer)
        self._bind("IpcGetMemHandle", ctypes.POINTER(_IpcHandle), pointer)
        self._bind("IpcOpenMemHandle", ctypes.POINTER(pointer), _IpcHandle, ctypes.c_uint)
        self._bind("IpcCloseMemHandle", pointer)
        self._bind("GetLastError")
        # CUDA has this one in the driver's library only, under the name of its second version.
        drivers = library if prefix == "hip" else ctypes.CDLL("libcuda.so.1")
        self._address_range = drivers["hipMemGetAddressRange" if prefix == "hip" else "cuMemGetAddressRange_v2"]
        self._address_range.argtypes = (ctypes.POINTER(pointer), ctypes.POINTER(size), pointer)

    def copy_2d(
        self, target: tuple[int, int], source: tuple[int, int], width: int, rows: int, kind: int, stream: int
    ) -> None:
        """Queue `rows` pieces of `width` bytes. `target` and `source` are (address, bytes from piece to piece)."""
        self._call(f"copy of {rows} x {width} bytes", "Memcpy2DAsync", *target, *source, width, rows, kind, stream)

    def register(self, address: int, size: int) -> None:
        self._call(f"pinning of {size} bytes", "HostRegister", address, size, _REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("unpinning", "HostUnregister", address)

    def allocation(self, address: int) -> int:
        """Where the allocation begins that holds `address`."""
        start, size = ctypes.c_void_p(), ctypes.c_size_t()
        code = self._address_range(ctypes.byref(start), ctypes.byref(size), address)
        if code or start.value is None:
            raise GpuError(f"no allocation holds address {address:#x}: error {code}")
        return start.value

    def export(self, address: int) -> bytes:
        """A handle with which another process of this host maps the allocation that begins at `address`."""
        handle = _IpcHandle()
        self._call("export of device memory", "IpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Address of another process's allocation in this one; `close` it before the owner frees it."""
        address = ctypes.c_void_p()
        opened = _IpcHandle.from_buffer_copy(handle)
        self._call("mapping of device memory", "IpcOpenMemHandle", ctypes.byref(address), opened, _IPC_LAZY_PEER_ACCESS)
        assert address.value is not None
        return address.value

    def close(self, address: int) -> None:
        self._call("unmapping of device memory", "IpcCloseMemHandle", address)

    def _bind(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, self._prefix + name)
        function.argtypes, function.restype = arguments, ctypes.c_int

    def _call(self, what: str, name: str, *arguments: object) -> None:
        code = getattr(self._library, self._prefix + name)(*arguments)
        if code:
            getattr(self._library, self._prefix + "GetLastError")()
            raise GpuError(f"{what} failed: {self._prefix}{name} gave error {code}")


@functools.cache
def gpu_runtime() -> GpuRuntime:
    """The runtime of this process. Starts the GPU context if there is none. Raises GpuError without a GPU build."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    part, prefix = ("libamdhip64", "hip") if torch.version.hip else ("libcudart", "cuda")
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if part in line}
    if not paths:
        raise GpuError(f"torch has a GPU build, but no {part} is mapped in this process")
    return GpuRuntime(ctypes.CDLL(sorted(paths)[0]), prefix)


def address_of(view: memoryview) -> int:
    """Address of the first byte of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
