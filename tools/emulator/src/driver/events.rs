//! Events: points in streams.

use std::ffi::c_uint;
use std::time::Instant;

use cudarc::driver::sys::{CUcontext, CUevent, CUevent_flags_enum as Flags, CUresult, CUstream};

use super::queue::StreamPoint;
use super::state::{DriverState, by_handle, in_context};
use super::streams::named;
use super::table::unique;
use super::work::StreamWork;
use super::{Answer, OutPointer};

/// An event.
#[derive(Debug, Default)]
pub(super) struct Event {
    /// Whether the event records time.
    timing: bool,
    /// The point of the last record.
    pub mark: Option<StreamPoint>,
    /// The capture that it was recorded in.
    pub capture: Option<usize>,
    /// The host time at which the stream reached the event.
    pub time: Option<Instant>,
    /// The number of queries since the event was recorded.
    asked: u32,
}

impl DriverState {
    /// Returns the point where an event was recorded outside of captures, or `None` if it was never recorded.
    fn recorded(&mut self, event: usize) -> Answer<Option<StreamPoint>> {
        let event = self.events.get(event)?;
        match event.capture {
            Some(_) => Err(CUresult::CUDA_ERROR_CAPTURED_EVENT),
            None => Ok(event.mark),
        }
    }

    /// Records an event behind all work of a stream, and behind `after` on other streams.
    fn record(&mut self, handle: usize, stream: usize, after: Vec<StreamPoint>) -> Answer {
        let capture = self.streams.get(stream)?.capture;
        self.events.get(handle)?;
        let work = StreamWork::Record(handle);
        let recorded = |mark| Event {
            mark,
            capture,
            ..Event::default()
        };
        let mut event = recorded(None);
        if !self.captured(stream, &work)? {
            // The event gets its mark before it is done, which may happen immediately.
            event = recorded(Some(self.streams.put(stream, work, after)?));
        }
        let (slot, mark) = (self.events.get_mut(handle)?, event.mark);
        event.timing = slot.timing;
        *slot = event;
        match mark {
            Some(mark) if !self.options.lazy => drop(self.advance(mark)),
            _ => {}
        }
        Ok(())
    }

    /// Records an event behind all work of all streams. The event uses a temporary stream.
    fn record_all(&mut self, event: usize) -> Answer {
        self.not_captured()?;
        let (stream, ends) = (unique(), self.streams.ends());
        self.streams.open(stream, false, 0);
        let recorded = self.record(event, stream, ends);
        self.streams.close(stream)?;
        recorded
    }

    /// Makes all future work on every stream wait for an event.
    fn wait_all(&mut self, event: usize) -> Answer {
        self.not_captured()?;
        let Some(mark) = self.recorded(event)? else {
            return Ok(());
        };
        for stream in self.streams.handles() {
            self.put_after(stream, StreamWork::Wait, vec![mark])?;
        }
        self.awaited.push(mark);
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(out: OutPointer<CUevent>, flags: c_uint) -> CUresult {
    in_context(|world| {
        let timing = flags & Flags::CU_EVENT_DISABLE_TIMING as c_uint == 0;
        let event = world.events.add(Event {
            timing,
            ..Event::default()
        });
        out.set(event as CUevent)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    by_handle(|world| world.events.remove(event as usize).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    by_handle(|world| world.record(event as usize, named(stream)?, Vec::new()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecordWithFlags(
    event: CUevent,
    stream: CUstream,
    _flags: c_uint,
) -> CUresult {
    cuEventRecord(event, stream)
}

/// Records an event in the only context.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxRecordEvent(_context: CUcontext, event: CUevent) -> CUresult {
    by_handle(|world| world.record_all(event as usize))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxWaitEvent(_context: CUcontext, event: CUevent) -> CUresult {
    by_handle(|world| world.wait_all(event as usize))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: CUevent) -> CUresult {
    by_handle(|world| {
        world.not_captured()?;
        let Some(mark) = world.recorded(event as usize)? else {
            return Ok(());
        };
        let event = world.events.get_mut(event as usize)?;
        event.asked += 1;
        let asked = event.asked;
        world.asked(mark, asked)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    by_handle(|world| match world.recorded(event as usize)? {
        Some(mark) => {
            world.waits("cuEventSynchronize");
            world.finish(mark)
        }
        None => Ok(()),
    })
}

fn elapsed(milliseconds: &OutPointer<f32>, start: CUevent, end: CUevent) -> CUresult {
    by_handle(|world| {
        let mut times = [start, end].into_iter().map(|event| {
            let event = world.events.get(event as usize)?;
            match (event.timing, event.mark, event.time) {
                (true, Some(_), Some(time)) => Ok(time),
                (true, Some(_), None) => Err(CUresult::CUDA_ERROR_NOT_READY),
                _ => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
            }
        });
        let (Some(start), Some(end)) = (times.next(), times.next()) else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let (start, end) = (start?, end?);
        if world.options.fixed_clock {
            return milliseconds.set(1.0);
        }
        let seconds = match end.checked_duration_since(start) {
            Some(later) => later.as_secs_f64(),
            None => -start.duration_since(end).as_secs_f64(),
        };
        milliseconds.set((seconds * 1e3) as f32)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(
    milliseconds: OutPointer<f32>,
    start: CUevent,
    end: CUevent,
) -> CUresult {
    elapsed(&milliseconds, start, end)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime_v2(
    milliseconds: OutPointer<f32>,
    start: CUevent,
    end: CUevent,
) -> CUresult {
    elapsed(&milliseconds, start, end)
}
