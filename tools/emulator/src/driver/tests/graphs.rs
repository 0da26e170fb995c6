//! Tests of captures and graphs.

use cudarc::driver::sys::CUstreamCaptureMode_enum as Mode;

use super::*;

#[test]
fn a_graph_does_again_what_was_captured() {
    for options in [Options::default(), lazy()] {
        let _turn = fresh(options);
        let (a, b) = (allocate(4), allocate(4));
        let (one, two) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
        let (fork, join) = (event(), event());
        good(cuMemsetD8_v2(b, 9, 4));
        good(cuStreamBeginCapture_v2(one, 0));
        good(cuMemsetD8Async(a, 5, 4, one));
        good(cuEventRecord(fork, one));
        good(cuStreamWaitEvent(two, fork, 0));
        good(cuMemcpyDtoDAsync_v2(b, a, 4, two));
        good(cuEventRecord(join, two));
        good(cuStreamWaitEvent(one, join, 0));
        let mut graph = null_mut();
        assert_eq!(
            cuStreamEndCapture(two, OutPointer(&mut graph)),
            CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        );
        good(cuStreamEndCapture(one, OutPointer(&mut graph)));
        assert_eq!(to_host(b, 4), [9; 4]);
        let (mut nodes, mut count) = ([null_mut(); 3], 0);
        // SAFETY: the buffer has three places.
        unsafe {
            good(cuGraphGetNodes(graph, null_mut(), &mut count));
            assert_eq!(count, 2);
            good(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
        }
        let mut kind = CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        good(cuGraphNodeGetType(nodes[1], OutPointer(&mut kind)));
        assert_eq!(kind, CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY);
        let mut executable = null_mut();
        good(cuGraphInstantiateWithFlags(
            OutPointer(&mut executable),
            graph,
            0,
        ));
        good(cuGraphDestroy(graph));
        for _ in 0..2 {
            good(cuMemsetD8Async(b, 0, 4, one));
            good(cuGraphLaunch(executable, one));
            good(cuStreamSynchronize(one));
            assert_eq!(to_host(b, 4), [5; 4]);
        }
        good(cuGraphExecDestroy(executable));
        assert_eq!(cuGraphLaunch(executable, one), CUDA_ERROR_INVALID_HANDLE);
    }
}

#[test]
fn a_capture_ends_by_what_it_cannot_hold() {
    let _turn = fresh(Options::default());
    let (stream, event) = (stream(NON_BLOCKING), event());
    let ended = |call: &dyn Fn() -> CUresult| {
        good(cuStreamBeginCapture_v2(stream, 0));
        let mut status = 0;
        good(cuStreamIsCapturing(stream, OutPointer(&mut status)));
        assert_eq!(status, 1);
        let said = call();
        let mut graph = null_mut();
        let ended = cuStreamEndCapture(stream, OutPointer(&mut graph));
        good(cuStreamIsCapturing(stream, OutPointer(&mut status)));
        assert_eq!(status, 0);
        (said, ended)
    };
    let (refused, spoilt) = (
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    );
    assert_eq!(ended(&|| CUDA_SUCCESS), (CUDA_SUCCESS, CUDA_SUCCESS));
    let mut address = 0;
    let address = &raw mut address;
    let allocate = || cuMemAlloc_v2(OutPointer(address), 4);
    assert_eq!(ended(&allocate), (refused, spoilt));
    assert_eq!(ended(&|| cuStreamSynchronize(stream)), (refused, spoilt));
    assert_eq!(ended(&|| cuEventQuery(event)), (refused, spoilt));
    let wait = || {
        good(cuEventRecord(event, stream));
        cuEventSynchronize(event)
    };
    assert_eq!(ended(&wait), (CUDA_ERROR_CAPTURED_EVENT, CUDA_SUCCESS));
}

/// Makes a call on another thread in the given mode during a capture. Returns the result of the call and of the end
/// of the capture.
fn called_beside(capture: Mode, thread: Mode) -> (CUresult, CUresult) {
    let (stream, event) = (stream(NON_BLOCKING), event());
    good(cuStreamBeginCapture_v2(stream, capture as c_uint));
    let event = event as usize;
    let called = std::thread::spawn(move || {
        exchange_mode(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, thread);
        cuEventQuery(event as CUevent)
    });
    let called = called.join().unwrap();
    let mut graph = null_mut();
    (called, cuStreamEndCapture(stream, OutPointer(&mut graph)))
}

#[track_caller]
fn exchange_mode(before: Mode, after: Mode) {
    let mut mode = after as c_uint;
    // SAFETY: the pointer is valid for writing.
    good(unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) });
    assert_eq!(mode, before as c_uint);
}

#[test]
fn the_modes_of_a_capture_and_of_a_thread_decide_what_is_prohibited() {
    let _turn = fresh(Options::default());
    let (global, local, relaxed) = (
        Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
    );
    let refused = (
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    );
    for (capture, thread, is_refused) in [
        (global, global, true),
        (global, local, false),
        (global, relaxed, false),
        (local, global, false),
        (relaxed, global, false),
    ] {
        let expected = if is_refused {
            refused
        } else {
            (CUDA_SUCCESS, CUDA_SUCCESS)
        };
        let seen = called_beside(capture, thread);
        assert_eq!(seen, expected, "{capture:?} {thread:?}");
    }
}

#[test]
fn a_relaxed_thread_may_do_all_but_ask_for_what_it_captures() {
    let _turn = fresh(Options::default());
    let (stream, captured, other) = (stream(NON_BLOCKING), event(), event());
    let (global, local, relaxed) = (
        Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
    );
    exchange_mode(global, relaxed);
    good(cuStreamBeginCapture_v2(stream, global as c_uint));
    good(cuEventRecord(captured, stream));
    good(cuEventQuery(other));
    allocate(4);
    assert_eq!(cuEventQuery(captured), CUDA_ERROR_CAPTURED_EVENT);
    exchange_mode(relaxed, local);
    assert_eq!(cuEventQuery(other), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    let mut graph = null_mut();
    assert_eq!(
        cuStreamEndCapture(stream, OutPointer(&mut graph)),
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    );
    let mut none = 3;
    // SAFETY: one pointer is valid for writing, the other is null.
    unsafe {
        assert_eq!(
            cuThreadExchangeStreamCaptureMode(&mut none),
            CUDA_ERROR_INVALID_VALUE
        );
        assert_eq!(
            cuThreadExchangeStreamCaptureMode(null_mut()),
            CUDA_ERROR_INVALID_VALUE
        );
    }
    exchange_mode(local, global);
}
