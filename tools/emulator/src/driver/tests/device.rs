//! Tests of the device, its context and its memory.

use super::*;

#[test]
fn the_device_answers() {
    let _turn = fresh(Options::default());
    let mut number = 0;
    good(cuDeviceGetCount(OutPointer(&mut number)));
    assert_eq!(number, 1);
    assert_eq!(
        cuDeviceGet(OutPointer(&mut number), 1),
        CUDA_ERROR_INVALID_DEVICE
    );
    good(cuDeviceGet(OutPointer(&mut number), 0));
    assert_eq!(number, 0);
    let mut ask = |attribute: c_uint| {
        let result = cuDeviceGetAttribute(OutPointer(&mut number), attribute, 0);
        (result, number)
    };
    let shared = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    assert_eq!(ask(shared as c_uint), (CUDA_SUCCESS, 232_448));
    let managed = Attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY;
    assert_eq!(ask(managed as c_uint), (CUDA_SUCCESS, 0));
    assert_eq!(ask(123_456).0, CUDA_ERROR_INVALID_VALUE);
    let mut name = [1 as c_char; 8];
    // SAFETY: the buffer has eight places.
    good(unsafe { cuDeviceGetName(name.as_mut_ptr(), 7, 0) });
    assert_eq!(name.map(|byte| byte as u8), *b"NVIDIA\0\x01");
    assert_eq!(
        cuDeviceGetCount(OutPointer(null_mut())),
        CUDA_ERROR_INVALID_VALUE
    );
}

#[test]
fn a_thread_needs_the_context() {
    let _turn = fresh(Options::default());
    let event = event() as usize;
    std::thread::spawn(move || {
        assert_eq!(cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
        // An event belongs to a context, so no context has to be current.
        good(cuEventSynchronize(event as CUevent));
        let mut context = null_mut();
        good(cuDevicePrimaryCtxRetain(OutPointer(&mut context), 0));
        good(cuCtxSetCurrent(context));
        good(cuCtxSynchronize());
        let mut current = null_mut();
        good(cuCtxGetCurrent(OutPointer(&mut current)));
        assert_eq!(current, context);
        good(cuCtxSetCurrent(null_mut()));
        assert_eq!(cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
        assert_eq!(cuCtxSetCurrent(8 as _), CUDA_ERROR_INVALID_CONTEXT);
        good(cuDevicePrimaryCtxRelease_v2(0));
    })
    .join()
    .unwrap();
    good(cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(cuCtxSynchronize(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

#[test]
fn memory_ends() {
    let _turn = fresh(Options {
        memory: 1 << 20,
        ..Options::default()
    });
    let first = allocate(1 << 19);
    let mut second = 0;
    let result = cuMemAlloc_v2(OutPointer(&mut second), (1 << 19) + 1);
    assert_eq!(result, CUDA_ERROR_OUT_OF_MEMORY);
    let (mut free, mut total) = (0, 0);
    good(cuMemGetInfo_v2(
        OutPointer(&mut free),
        OutPointer(&mut total),
    ));
    assert_eq!((free, total), (1 << 19, 1 << 20));
    good(cuMemFreeAsync(first, null_mut()));
    good(cuMemAlloc_v2(OutPointer(&mut second), 1 << 20));
    assert_eq!(
        cuMemAlloc_v2(OutPointer(&mut second), 0),
        CUDA_ERROR_INVALID_VALUE
    );
    let mut pool = null_mut();
    good(cuDeviceGetDefaultMemPool(OutPointer(&mut pool), 0));
    good(cuMemPoolTrimTo(pool, 0));
    assert_eq!(cuMemPoolTrimTo(null_mut(), 0), CUDA_ERROR_INVALID_HANDLE);
}
