//! Tests of streams and events.

use super::*;

#[test]
fn a_missing_wait_shows_in_lazy_streams() {
    for wait in [false, true] {
        let _turn = fresh(lazy());
        let (a, b) = (allocate(4), allocate(4));
        good(cuMemsetD8_v2(a, 1, 4));
        good(cuCtxSynchronize());
        let (one, two, event) = (stream(NON_BLOCKING), stream(NON_BLOCKING), event());
        good(cuMemsetD8Async(a, 2, 4, one));
        good(cuEventRecord(event, one));
        if wait {
            good(cuStreamWaitEvent(two, event, 0));
        }
        good(cuMemcpyDtoDAsync_v2(b, a, 4, two));
        good(cuStreamSynchronize(two));
        let done = if wait {
            CUDA_SUCCESS
        } else {
            CUDA_ERROR_NOT_READY
        };
        assert_eq!(cuEventQuery(event), done);
        assert_eq!(to_host(b, 4), [1 + u8::from(wait); 4]);
        good(cuEventSynchronize(event));
        assert_eq!(to_host(a, 4), [2; 4]);
    }
}

#[test]
fn an_event_of_the_context_stands_behind_and_before_all_streams() {
    for wait in [false, true] {
        let _turn = fresh(lazy());
        let (a, b, c) = (allocate(4), allocate(4), allocate(4));
        good(cuMemsetD8_v2(a, 1, 4));
        good(cuCtxSynchronize());
        let (one, two, event) = (stream(NON_BLOCKING), stream(NON_BLOCKING), event());
        good(cuMemsetD8Async(a, 2, 2, one));
        good(cuMemsetD8Async(a + 2, 2, 2, two));
        good(cuCtxRecordEvent(null_mut(), event));
        let three = stream(NON_BLOCKING);
        if wait {
            good(cuCtxWaitEvent(null_mut(), event));
        }
        // On a stream that already existed, and on a new stream.
        good(cuMemcpyDtoDAsync_v2(b, a, 4, three));
        let four = stream(NON_BLOCKING);
        good(cuMemcpyDtoDAsync_v2(c, a, 4, four));
        for (copied, on) in [(c, four), (b, three)] {
            good(cuStreamSynchronize(on));
            assert_eq!(to_host(copied, 4), [1 + u8::from(wait); 4]);
        }
        good(cuEventSynchronize(event));
        assert_eq!(to_host(a, 4), [2; 4]);
    }
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_alone() {
    let _turn = fresh(lazy());
    let a = allocate(2);
    good(cuMemsetD8_v2(a, 0, 2));
    good(cuCtxSynchronize());
    good(cuMemsetD8Async(a, 1, 1, stream(0)));
    good(cuMemsetD8Async(a + 1, 1, 1, stream(NON_BLOCKING)));
    assert_eq!(to_host(a, 2), [1, 0]);
    good(cuCtxSynchronize());
    assert_eq!(to_host(a, 2), [1, 1]);
}

#[test]
fn a_question_is_answered_in_the_end() {
    let _turn = fresh(lazy());
    let (a, stream, event) = (allocate(1), stream(0), event());
    assert_eq!(cuEventQuery(event), CUDA_SUCCESS);
    good(cuMemsetD8Async(a, 1, 1, stream));
    good(cuEventRecord(event, stream));
    let asked = (0..10).map(|_| cuEventQuery(event));
    let asked = asked.filter(|answer| *answer == CUDA_ERROR_NOT_READY);
    assert_eq!(asked.count(), 3);
    good(cuMemsetD8Async(a, 1, 1, stream));
    assert_eq!(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
    let mut milliseconds = -1.0;
    let never = cuEventElapsedTime(OutPointer(&mut milliseconds), event, self::event());
    assert_eq!(never, CUDA_ERROR_INVALID_HANDLE);
    good(cuEventElapsedTime(
        OutPointer(&mut milliseconds),
        event,
        event,
    ));
    assert_eq!(milliseconds, 0.0);
}

#[test]
fn a_fixed_clock_gives_all_work_the_same_time() {
    let _turn = fresh(Options {
        fixed_clock: true,
        ..Options::default()
    });
    let events = [event(), event()];
    for event in events {
        good(cuEventRecord(event, null_mut()));
    }
    let mut milliseconds = -1.0;
    let [start, end] = events;
    good(cuEventElapsedTime(
        OutPointer(&mut milliseconds),
        start,
        end,
    ));
    assert_eq!(milliseconds, 1.0);
}

#[test]
fn a_function_of_the_host_runs_in_order_and_may_call_nothing() {
    unsafe extern "C" fn call(data: *mut c_void) {
        // SAFETY: the pointer is the data that the test passed.
        let said = unsafe { &mut *data.cast::<CUresult>() };
        *said = cuCtxSynchronize();
    }
    let _turn = fresh(lazy());
    let mut said = CUDA_SUCCESS;
    let data = (&raw mut said).cast();
    // SAFETY: the data lives until the function was called.
    good(unsafe { cuLaunchHostFunc(null_mut(), Some(call), data) });
    assert_eq!(said, CUDA_SUCCESS);
    good(cuCtxSynchronize());
    assert_eq!(said, CUDA_ERROR_NOT_PERMITTED);
}

#[test]
fn a_stream_waits_for_what_another_thread_does() {
    for options in [Options::default(), lazy()] {
        let _turn = fresh(options);
        let (a, one, event) = (allocate(1), stream(NON_BLOCKING), event());
        let (two, open) = (stream(NON_BLOCKING), Arc::new(AtomicBool::new(false)));
        good(cuMemsetD8Async(a, 1, 1, one));
        let gate = open.clone();
        let attempt = move |_: &Memory| Ok(gate.load(Ordering::SeqCst));
        good(jobs::enqueue_until(one, Arc::new(attempt)));
        good(cuEventRecord(event, one));
        let write = move |memory: &Memory| {
            if memory.snapshot().holds(a, 1) {
                // SAFETY: the memory was just allocated.
                unsafe { (a as *mut u8).write(2) };
                Ok(())
            } else {
                Err("gone".into())
            }
        };
        good(cuStreamWaitEvent(two, event, 0));
        good(jobs::enqueue(two, Arc::new(write), Value::Null));
        assert!((0..10).all(|_| cuEventQuery(event) == CUDA_ERROR_NOT_READY));
        assert!(!jobs::is_idle(two as usize));
        let opener = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            open.store(true, Ordering::SeqCst);
            jobs::wake();
        });
        good(cuStreamSynchronize(two));
        assert!(jobs::is_idle(one as usize));
        opener.join().unwrap();
        assert_eq!(to_host(a, 1), [2]);
        let bad = |_: &Memory| Err("on purpose".to_owned());
        good(jobs::enqueue(two, Arc::new(bad), Value::Null));
        assert_eq!(cuStreamSynchronize(two), CUDA_ERROR_ILLEGAL_ADDRESS);
    }
}
