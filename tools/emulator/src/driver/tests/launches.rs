//! Tests of modules and launches.

use super::*;

#[test]
fn a_kernel_that_traps_ruins_the_context() {
    for options in [Options::default(), lazy()] {
        let _turn = fresh(options);
        let bad = kernel(".visible .entry k()\n{\ntrap;\n}\n");
        good(launch(bad, [1; 3], [32, 1, 1], 0, null_mut()));
        assert_eq!(cuCtxSynchronize(), CUDA_ERROR_LAUNCH_FAILED);
        let mut address = 0;
        let result = cuMemAlloc_v2(OutPointer(&mut address), 4);
        assert_eq!(result, CUDA_ERROR_LAUNCH_FAILED);
    }
}

#[test]
fn modules_are_judged_when_they_are_loaded() {
    let _turn = fresh(Options::default());
    let unknown = ".visible .entry k()\n{\n.reg .b32 %r<2>;\nabracadabra.b32 %r1, 1;\nret;\n}\n";
    assert_eq!(load(unknown).0, CUDA_ERROR_NOT_SUPPORTED);
    assert_eq!(load("nonsense").0, CUDA_ERROR_INVALID_PTX);
    let mut module = null_mut();
    let code = [0x7f_u8, b'E', b'L', b'F', 0];
    // SAFETY: the code is null-terminated.
    let result = unsafe { cuModuleLoadData(OutPointer(&mut module), code.as_ptr().cast()) };
    assert_eq!(result, CUDA_ERROR_NO_BINARY_FOR_GPU);
    let body = ".global .align 4 .u32 g[2] = {1, 258};\n.visible .entry k()\n{\nret;\n}\n";
    let (result, module) = load(body);
    good(result);
    let (mut address, mut bytes, mut function) = (0, 0, null_mut());
    // SAFETY: the strings are null-terminated.
    unsafe {
        let out = (OutPointer(&mut address), OutPointer(&mut bytes));
        good(cuModuleGetGlobal_v2(out.0, out.1, module, c"g".as_ptr()));
        assert_eq!(bytes, 8);
        assert_eq!(to_host(address, 8), [1, 0, 0, 0, 2, 1, 0, 0]);
        let result = cuModuleGetFunction(OutPointer(&mut function), module, c"other".as_ptr());
        assert_eq!(result, CUDA_ERROR_NOT_FOUND);
        good(cuModuleGetFunction(
            OutPointer(&mut function),
            module,
            c"k".as_ptr(),
        ));
    }
    good(cuModuleUnload(module));
    let gone = launch(function, [1; 3], [1; 3], 0, null_mut());
    assert_eq!(gone, CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(cuModuleUnload(module), CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn launches_keep_the_limits() {
    let _turn = fresh(Options::default());
    let body = ".visible .entry k()\n{\n.shared .align 4 .b8 s[1024];\nret;\n}\n";
    let function = kernel(body);
    let with = |grid, block, shared| launch(function, grid, block, shared, null_mut());
    good(with([1; 3], [1024, 1, 1], 47 << 10));
    for (grid, block, shared) in [
        ([0, 1, 1], [1; 3], 0),
        ([1, 65_536, 1], [1; 3], 0),
        ([1; 3], [1, 0, 1], 0),
        ([1; 3], [1025, 1, 1], 0),
        ([1; 3], [32, 33, 1], 0),
        ([1; 3], [1, 1, 65], 0),
        ([1; 3], [1; 3], (47 << 10) + 1),
    ] {
        let result = with(grid, block, shared);
        assert_eq!(
            result, CUDA_ERROR_INVALID_VALUE,
            "{grid:?} {block:?} {shared}"
        );
    }
    let most = 8;
    assert_eq!(
        cuFuncSetAttribute(function, most, (226 << 10) + 1),
        CUDA_ERROR_INVALID_VALUE
    );
    good(cuFuncSetAttribute(function, most, 226 << 10));
    good(with([1; 3], [1; 3], 226 << 10));
    let mut number = 0 as c_int;
    good(cuFuncGetAttribute(OutPointer(&mut number), most, function));
    assert_eq!(number, 226 << 10);
    let mut ask = |threads, shared| {
        let out = OutPointer(&mut number);
        good(cuOccupancyMaxActiveBlocksPerMultiprocessor(
            out, function, threads, shared,
        ));
        number
    };
    assert_eq!(ask(1024, 0), 2);
    assert_eq!(ask(33, 0), 32);
    assert_eq!(ask(32, 100 << 10), 2);
    assert_eq!(ask(32, 227 << 10), 0);
    assert_eq!(ask(1025, 0), 0);
    // A missing parameter.
    let wants = kernel(".visible .entry k(.param .u64 p)\n{\nret;\n}\n");
    let result = launch(wants, [1; 3], [1; 3], 0, null_mut());
    assert_eq!(result, CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn a_tensor_map_is_written_where_it_is_wanted() {
    use crate::tensor_map::TensorMap;
    let _turn = fresh(Options::default());
    #[repr(align(64))]
    struct Map([u8; 128]);
    let mut map = Map([0; 128]);
    let encode = |map: *mut u8, rank, sizes: *const u64| {
        let (strides, boxes, steps) = ([64u64], [32u32, 8], [1u32, 1]);
        // SAFETY: the arrays have two values each, and one stride.
        unsafe {
            let (strides, boxes) = (strides.as_ptr(), boxes.as_ptr());
            cuTensorMapEncodeTiled(
                map.cast(),
                6,
                rank,
                4096 as _,
                sizes,
                strides,
                boxes,
                steps.as_ptr(),
                0,
                2,
                0,
                0,
            )
        }
    };
    let sizes = [32u64, 100];
    let place = map.0.as_mut_ptr();
    good(encode(place, 2, sizes.as_ptr()));
    let said = TensorMap::decode(&map.0).unwrap();
    assert_eq!(
        (said.address, said.sizes[1], said.strides[1]),
        (4096, 100, 64)
    );
    for refused in [
        encode(place.wrapping_add(4), 2, sizes.as_ptr()),
        encode(place, 6, sizes.as_ptr()),
        encode(place, 2, std::ptr::null()),
    ] {
        assert_eq!(refused, CUDA_ERROR_INVALID_VALUE);
    }
}

#[test]
fn what_a_gpu_lets_pass_is_told_once() {
    // Shared memory that was never written.
    let body = ".visible .entry k()\n{\n.shared .align 4 .b8 s[64];\n.reg .b32 %r<4>;\n\
                mov.u32 %r1, s;\nld.shared.u32 %r2, [%r1];\nret;\n}\n";
    for (mut options, at_launch) in [(Options::default(), true), (lazy(), false)] {
        options.machine.checks.unwritten = true;
        let _turn = fresh(options);
        let function = kernel(body);
        let told = launch(function, [1; 3], [1; 3], 0, null_mut());
        let waited = cuCtxSynchronize();
        let expected = if at_launch {
            (CUDA_ERROR_UNKNOWN, CUDA_SUCCESS)
        } else {
            (CUDA_SUCCESS, CUDA_ERROR_UNKNOWN)
        };
        assert_eq!((told, waited), expected);
        good(cuCtxSynchronize());
    }
}

#[test]
fn the_text_that_messages_speak_of_is_kept() {
    let folder = std::env::temp_dir().join(format!("burn-megatron-ptx-{}", std::process::id()));
    let _turn = fresh(Options {
        ptx: Some(folder.clone()),
        ..Options::default()
    });
    kernel(".visible .entry k()\n{\nret;\n}\n");
    let kept = std::fs::read_to_string(folder.join("k.ptx")).unwrap();
    assert!(
        kept.starts_with(SM) && kept.ends_with("ret;\n}\n"),
        "{kept}"
    );
    std::fs::remove_dir_all(folder).unwrap();
}
