//! The stream functions of the driver.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUevent, CUhostFn, CUresult, CUstream, CUstream_flags_enum as Flags};

use super::queue::{LEGACY, StreamPoint};
use super::state::{DriverState, by_handle, in_context};
use super::table::unique;
use super::work::StreamWork;
use super::{Answer, OutPointer};

/// With lazy streams, the number of queries that return "not ready" before the work is executed.
const PATIENCE: u32 = 3;

/// Returns the handle of a stream. The per-thread default stream is not supported.
pub(super) fn named(stream: CUstream) -> Answer<usize> {
    match stream as usize {
        0 | 1 => Ok(LEGACY),
        2 => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        handle => Ok(handle),
    }
}

impl DriverState {
    /// Checks whether all work up to a mark is done. After several queries, the work is executed.
    pub fn asked(&mut self, mark: StreamPoint, asked: u32) -> Answer {
        if asked > PATIENCE || !self.options.lazy {
            self.advance(mark);
        }
        self.sound()?;
        if self.streams.passed(mark) {
            Ok(())
        } else {
            Err(CUresult::CUDA_ERROR_NOT_READY)
        }
    }
}

fn create(out: &OutPointer<CUstream>, flags: c_uint, priority: c_int) -> CUresult {
    in_context(|world| {
        let blocking = match flags {
            flags if flags == Flags::CU_STREAM_DEFAULT as c_uint => true,
            flags if flags == Flags::CU_STREAM_NON_BLOCKING as c_uint => false,
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        };
        let handle = unique();
        world.streams.open(handle, blocking, priority.clamp(-5, 0));
        let mut awaited = std::mem::take(&mut world.awaited);
        awaited.retain(|mark| !world.streams.passed(*mark));
        if !awaited.is_empty() {
            world.awaited.clone_from(&awaited);
            world.put_after(handle, StreamWork::Wait, awaited)?;
        }
        out.set(handle as CUstream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(out: OutPointer<CUstream>, flags: c_uint) -> CUresult {
    create(&out, flags, 0)
}

/// Creates a stream. Priorities do not change results.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(
    out: OutPointer<CUstream>,
    flags: c_uint,
    priority: c_int,
) -> CUresult {
    create(&out, flags, priority)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    by_handle(|world| match named(stream)? {
        LEGACY => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
        stream => world.streams.close(stream),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    by_handle(|world| {
        let stream = named(stream)?;
        world.stream_not_captured(stream)?;
        world.waits("cuStreamSynchronize");
        world.finish_stream(stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: CUstream) -> CUresult {
    by_handle(|world| {
        let stream = named(stream)?;
        world.stream_not_captured(stream)?;
        let end = world.streams.end(stream)?;
        let queue = world.streams.get(stream)?;
        queue.asked += 1;
        let asked = queue.asked;
        world.asked(end, asked)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) -> CUresult {
    by_handle(|world| {
        let stream = named(stream)?;
        world.streams.get(stream)?;
        let (mark, capture) = {
            let event = world.events.get(event as usize)?;
            (event.mark, event.capture)
        };
        match (capture, mark) {
            (Some(capture), _) => world.join_capture(stream, capture),
            (None, Some(mark)) => world.put_after(stream, StreamWork::Wait, vec![mark]),
            (None, None) => Ok(()),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetPriority(stream: CUstream, priority: OutPointer<c_int>) -> CUresult {
    in_context(|world| priority.set(world.streams.get(named(stream)?)?.priority))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetFlags(stream: CUstream, flags: OutPointer<c_uint>) -> CUresult {
    in_context(|world| {
        let blocking = world.streams.get(named(stream)?)?.blocking;
        flags.set(if blocking {
            Flags::CU_STREAM_DEFAULT as c_uint
        } else {
            Flags::CU_STREAM_NON_BLOCKING as c_uint
        })
    })
}

/// Puts a host function on a stream. The function runs while the driver is locked. It must not call the driver, as
/// the manual states.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    stream: CUstream,
    function: CUhostFn,
    data: *mut c_void,
) -> CUresult {
    in_context(|world| {
        let function = function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        world.put(named(stream)?, StreamWork::Call(function, data as usize))
    })
}
