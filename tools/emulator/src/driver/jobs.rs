//! Work that the other CUDA libraries put on streams, and the memory that they share with kernels.

use std::sync::Arc;

use cudarc::driver::sys::{CUresult, CUstream};
use serde_json::Value;

#[cfg(doc)]
use super::options::Options;
use super::state::{anywhere, in_context};
use super::streams::named;
use super::work::StreamWork;
use crate::memory::Memory;

/// Work on the device memory. It runs once, or at each launch of its graph. An error of the work is a fault of the
/// device.
pub(crate) type Job = Arc<dyn Fn(&Memory) -> Result<(), String> + Send + Sync>;

/// Work that waits for other work. When the stream reaches it, it is tried after each event until it returns `true`.
pub(crate) type Attempt = Arc<dyn Fn(&Memory) -> Result<bool, String> + Send + Sync>;

/// Puts work on a stream. Each time the work runs, `line` is appended to the file of counts.
pub(crate) fn enqueue(stream: CUstream, job: Job, line: Value) -> CUresult {
    let work = StreamWork::Job(job, Arc::new(line));
    in_context(|world| world.put(named(stream)?, work))
}

/// Returns whether [products are filled](Options::fill_products).
pub(crate) fn fills_products() -> bool {
    let mut fills = false;
    anywhere(|world| {
        fills = world.options.fill_products;
        Ok(())
    });
    fills
}

/// Puts work on a stream where it waits for other work. Any thread may try the work. It must not call the driver.
pub(crate) fn enqueue_until(stream: CUstream, attempt: Attempt) -> CUresult {
    in_context(|world| {
        world.put(named(stream)?, StreamWork::Attempt(attempt))?;
        if !world.options.lazy {
            world.stir();
        }
        Ok(())
    })
}

/// Retries work that waits on streams, after a change that it may wait for.
pub(crate) fn wake() {
    anywhere(|world| {
        if !world.options.lazy {
            world.stir();
        }
        Ok(())
    });
}

/// Allocates device memory. Returns `None` if the device memory is exhausted.
pub(crate) fn allocate(bytes: usize) -> Option<u64> {
    let mut address = None;
    in_context(|world| {
        address = Some(world.allocate(bytes)?);
        Ok(())
    });
    address
}

/// Frees memory of [`allocate`]. Returns whether the address was allocated.
pub(crate) fn free(address: u64) -> bool {
    let mut freed = false;
    in_context(|world| {
        world.finish_all()?;
        freed = world.memory.free(address);
        Ok(())
    });
    freed
}

/// Returns whether all these bytes are device memory.
pub(crate) fn holds(address: u64, bytes: usize) -> bool {
    let mut held = false;
    anywhere(|world| {
        held = world.memory.snapshot().holds(address, bytes);
        Ok(())
    });
    held
}

/// Returns whether a stream has no work left.
#[cfg(test)]
pub(crate) fn is_idle(stream: usize) -> bool {
    let mut idle = false;
    anywhere(|world| {
        let end = world.streams.end(stream)?;
        idle = world.streams.passed(end);
        Ok(())
    });
    idle
}

/// The parts of the driver that tests of libraries need.
#[cfg(test)]
pub(crate) mod testing {
    use std::ptr::null_mut;

    use parking_lot::MutexGuard;

    use super::super::OutPointer;
    use super::super::options::Options;
    use super::super::state::{CONTEXT, CURRENT, fresh};
    use super::super::streams::cuStreamCreate;
    use super::CUresult;

    /// Prepares a new device. Only one test at a time can use it.
    pub(crate) fn enter() -> MutexGuard<'static, ()> {
        fresh(Options::default())
    }

    /// Makes the context current on another thread of the test.
    pub(crate) fn attach() {
        CURRENT.set(vec![CONTEXT]);
    }

    /// Creates a stream that does not wait for other streams.
    pub(crate) fn stream() -> usize {
        let mut stream = null_mut();
        let created = cuStreamCreate(OutPointer(&mut stream), 1);
        assert_eq!(created, CUresult::CUDA_SUCCESS);
        stream as usize
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::super::OutPointer;
    use super::super::copies::{cuMemcpyDtoH_v2, cuMemcpyDtoHAsync_v2};
    use super::super::events::{cuEventCreate, cuEventQuery, cuEventRecord, cuEventSynchronize};
    use super::super::memory::{cuMemAlloc_v2, cuMemFree_v2};
    use super::super::options::Options;
    use super::super::state::fresh;
    use super::super::streams::cuStreamSynchronize;
    use super::*;
    use CUresult::{CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_NOT_READY, CUDA_SUCCESS};

    /// Returns a stream that waits until `open` is set, and then writes to `address`.
    fn standing(open: &Arc<AtomicBool>, address: u64) -> CUstream {
        let stream = testing::stream() as CUstream;
        let open = open.clone();
        let attempt = move |_: &_| Ok(open.load(Ordering::SeqCst));
        assert_eq!(enqueue_until(stream, Arc::new(attempt)), CUDA_SUCCESS);
        let job = move |_: &_| {
            // SAFETY: the test has allocated the memory.
            unsafe { (address as *mut u32).write(7) };
            Ok(())
        };
        assert_eq!(enqueue(stream, Arc::new(job), Value::Null), CUDA_SUCCESS);
        stream
    }

    #[test]
    fn who_waits_for_a_stream_that_stands_lets_others_at_the_driver() {
        for lazy in [false, true] {
            let options = Options {
                lazy,
                ..Options::default()
            };
            let _turn = fresh(options);
            let mut address = 0;
            assert_eq!(cuMemAlloc_v2(OutPointer(&mut address), 4), CUDA_SUCCESS);
            // Each iteration waits in a different way, and must observe the write.
            for way in 0..4 {
                let open = Arc::new(AtomicBool::new(false));
                let stream = standing(&open, address);
                let mut event = std::ptr::null_mut();
                assert_eq!(cuEventCreate(OutPointer(&mut event), 2), CUDA_SUCCESS);
                assert_eq!(cuEventRecord(event, stream), CUDA_SUCCESS);
                for _ in 0..9 {
                    assert_eq!(cuEventQuery(event), CUDA_ERROR_NOT_READY);
                }
                let found = AtomicU32::new(0);
                let place = found.as_ptr().cast();
                thread::scope(|scope| {
                    scope.spawn(|| {
                        testing::attach();
                        thread::sleep(Duration::from_millis(20));
                        open.store(true, Ordering::SeqCst);
                        wake();
                    });
                    let waited = match way {
                        0 => cuStreamSynchronize(stream),
                        1 => cuEventSynchronize(event),
                        // SAFETY: the place has 4 bytes.
                        2 => unsafe { cuMemcpyDtoHAsync_v2(place, address, 4, stream) },
                        _ => {
                            let mut other = 0;
                            assert_eq!(cuMemAlloc_v2(OutPointer(&mut other), 4), CUDA_SUCCESS);
                            cuMemFree_v2(other)
                        }
                    };
                    assert_eq!(waited, CUDA_SUCCESS);
                    assert!(open.load(Ordering::SeqCst), "{way} did not wait");
                });
                if way == 2 {
                    assert_eq!(found.load(Ordering::SeqCst), 7);
                }
                assert_eq!(cuEventQuery(event), CUDA_SUCCESS);
                // SAFETY: the place has 4 bytes.
                let copied = unsafe { cuMemcpyDtoH_v2(place, address, 4) };
                assert_eq!((copied, found.load(Ordering::SeqCst)), (CUDA_SUCCESS, 7));
            }
        }
    }

    #[test]
    fn what_a_job_says_is_a_fault() {
        let _turn = testing::enter();
        let stream = testing::stream() as CUstream;
        let job = |_: &_| Err("nothing is there".to_string());
        assert_eq!(enqueue(stream, Arc::new(job), Value::Null), CUDA_SUCCESS);
        assert_eq!(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(
            enqueue(stream, Arc::new(|_| Ok(())), Value::Null),
            CUDA_ERROR_ILLEGAL_ADDRESS
        );
    }
}
