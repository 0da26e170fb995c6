//! Tests of copies and fills.

use super::*;

#[test]
fn bytes_go_there_and_back_and_no_further() {
    let _turn = fresh(Options::default());
    let (a, b) = (allocate(64), allocate(64));
    let bytes: Vec<_> = (0..64).collect();
    good(to_device(a, &bytes));
    good(cuMemcpyDtoD_v2(b + 8, a, 40));
    assert_eq!(to_host(b + 8, 40), bytes[..40]);
    assert_eq!(to_device(a + 1, &bytes), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(to_device(8, &bytes), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(cuMemcpyDtoD_v2(b, a + 60, 5), CUDA_ERROR_INVALID_VALUE);
    good(cuMemsetD32Async(b + 4, 0x0403_0201, 2, null_mut()));
    assert_eq!(to_host(b + 4, 8), [1, 2, 3, 4, 1, 2, 3, 4]);
    let odd = cuMemsetD32Async(b + 2, 0, 2, null_mut());
    assert_eq!(odd, CUDA_ERROR_INVALID_VALUE);
    assert_eq!(cuMemsetD8_v2(b, 0, 65), CUDA_ERROR_INVALID_VALUE);
    good(cuMemFree_v2(a));
    assert_eq!(cuMemFree_v2(a), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(to_device(a, &bytes), CUDA_ERROR_INVALID_VALUE);
    // None of these errors is a fault of the context.
    good(cuMemFree_v2(b));
}

#[test]
fn rows_keep_their_pitch() {
    let _turn = fresh(Options::default());
    let device = allocate(32);
    good(cuMemsetD8_v2(device, 0xee, 32));
    let mut host: Vec<u8> = (0..12).collect();
    let end = |kind, host: *mut u8, device, pitch, x| (kind, host, device, pitch, x);
    let copy = |from: (_, *mut u8, u64, usize, usize), to: (_, *mut u8, u64, usize, usize)| {
        CUDA_MEMCPY2D {
            srcXInBytes: from.4,
            srcY: 0,
            srcMemoryType: from.0,
            srcHost: from.1.cast::<c_void>(),
            srcDevice: from.2,
            srcArray: null_mut(),
            srcPitch: from.3,
            dstXInBytes: to.4,
            dstY: 1,
            dstMemoryType: to.0,
            dstHost: to.1.cast(),
            dstDevice: to.2,
            dstArray: null_mut(),
            dstPitch: to.3,
            WidthInBytes: 3,
            Height: 2,
        }
    };
    let on_host = end(CUmemorytype::CU_MEMORYTYPE_HOST, host.as_mut_ptr(), 0, 4, 1);
    let on_device = end(CUmemorytype::CU_MEMORYTYPE_DEVICE, null_mut(), device, 8, 2);
    // SAFETY: the rows lie inside the allocated memory.
    good(unsafe { cuMemcpy2D_v2(&copy(on_host, on_device)) });
    let got = to_host(device + 8, 16);
    let e = 0xee;
    assert_eq!(got, [e, e, 1, 2, 3, e, e, e, e, e, 5, 6, 7, e, e, e]);
    let narrow = end(CUmemorytype::CU_MEMORYTYPE_DEVICE, null_mut(), device, 2, 0);
    // SAFETY: the call is refused.
    let refused = unsafe { cuMemcpy2D_v2(&copy(on_host, narrow)) };
    assert_eq!(refused, CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn pinned_memory_is_read_when_the_copy_runs() {
    let _turn = fresh(lazy());
    let (a, stream) = (allocate(2), stream(NON_BLOCKING));
    let mut ordinary = [1u8];
    let pinned = pinned(1);
    // SAFETY: each allocation has one byte and lives until the end.
    unsafe {
        pinned.write(1);
        good(cuMemcpyHtoDAsync_v2(a, ordinary.as_ptr().cast(), 1, stream));
        good(cuMemcpyHtoDAsync_v2(a + 1, pinned.cast(), 1, stream));
        ordinary[0] = 2;
        pinned.write(2);
        good(cuStreamSynchronize(stream));
        assert_eq!(to_host(a, 2), [1, 2]);
        assert_eq!(ordinary, [2]);
        // Copies to pinned memory run only when a call waits. Copies to other memory run immediately.
        good(cuMemcpyDtoHAsync_v2(pinned.cast(), a, 1, stream));
        assert_eq!(pinned.read(), 2);
        good(cuMemcpyDtoHAsync_v2(
            ordinary.as_mut_ptr().cast(),
            a,
            1,
            stream,
        ));
        assert_eq!((pinned.read(), ordinary), (1, [1]));
        good(cuMemFreeHost(pinned.cast()));
    }
}

#[test]
fn what_is_used_after_it_is_freed_is_a_fault() {
    let _turn = fresh(lazy());
    let (a, b) = (allocate(4), allocate(4));
    let stream = stream(NON_BLOCKING);
    good(cuMemFreeAsync(a, stream));
    good(cuMemcpyDtoDAsync_v2(b, a, 4, stream));
    assert_eq!(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(cuMemFree_v2(b), CUDA_ERROR_ILLEGAL_ADDRESS);
    let mut count = 0;
    good(cuDeviceGetCount(OutPointer(&mut count)));
}
