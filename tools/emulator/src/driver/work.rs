//! The work on a stream, and its execution.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::{CUgraphNodeType, CUresult};
use serde_json::Value;

use super::errors::{code, passes, say};
use super::jobs::{Attempt, Job};
use super::launch::KernelLaunch;
use super::queue::{DependencyPath, StreamPoint};
use super::state::{CALLED_BACK, DriverGuard, DriverState};
use super::transfers::{Copy, FillPattern};
use super::{Answer, counts};
use crate::machine::{Launch, run};

/// A function of the host.
pub(super) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Something to do.
#[derive(Clone)]
pub(super) enum StreamWork {
    Launch(Arc<KernelLaunch>),
    Copy(Copy),
    FillPattern(FillPattern),
    /// A mark that memory was allocated at, which happens at the call.
    Allocate,
    Free(u64),
    Call(HostFunction, usize),
    /// The work of other libraries, and the line that it is counted by.
    Job(Job, Arc<Value>),
    Attempt(Attempt),
    /// The event, by its handle.
    Record(usize),
    /// Waits for what the stream was told to wait for.
    Wait,
}

impl StreamWork {
    /// Returns its kind of node in a graph; `None` for work that only orders.
    pub fn node(&self) -> Option<CUgraphNodeType> {
        Some(match self {
            Self::Launch(_) | Self::Job(..) | Self::Attempt(_) => {
                CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL
            }
            Self::Copy(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY,
            Self::FillPattern(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET,
            Self::Allocate => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC,
            Self::Free(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE,
            Self::Call(..) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST,
            Self::Record(_) | Self::Wait => return None,
        })
    }
}

impl DriverState {
    /// Puts work on a stream, or into the capture that the stream is in.
    pub fn put(&mut self, stream: usize, work: StreamWork) -> Answer {
        self.put_after(stream, work, Vec::new())
    }

    /// As [`put`](Self::put), behind points of other streams too.
    pub fn put_after(
        &mut self,
        stream: usize,
        work: StreamWork,
        after: Vec<StreamPoint>,
    ) -> Answer {
        if self.captured(stream, &work)? {
            return Ok(());
        }
        let mark = self.streams.put(stream, work, after)?;
        if !self.options.lazy {
            self.advance(mark);
        }
        self.finding.take().map_or(Ok(()), Err)
    }

    /// Does what can be done to get to a mark; whether it was reached.
    pub fn advance(&mut self, mark: StreamPoint) -> bool {
        let mut way = DependencyPath::to(mark);
        while let Some(stream) = self.streams.next(&mut way) {
            let Some((work, end)) = self.streams.first(stream) else {
                return false;
            };
            let work = work.clone();
            // What stands behind a fault never runs.
            if self.fault.is_none() && !self.perform(&work, end) {
                return false;
            }
            self.streams.done(stream);
            self.performed += 1;
        }
        true
    }

    /// Does all that can be done, on every stream; whether there was any.
    pub fn stir(&mut self) -> bool {
        let before = self.performed;
        let mut last = None;
        while last != Some(self.performed) {
            last = Some(self.performed);
            for mark in self.streams.ends() {
                self.advance(mark);
            }
        }
        self.performed > before
    }

    /// Returns the fault of a kernel so far.
    pub fn sound(&mut self) -> Answer {
        let wrong = self.fault.or(self.finding.take());
        wrong.map_or(Ok(()), Err)
    }

    /// Does one piece of work; whether it could be done yet.
    fn perform(&mut self, work: &StreamWork, mark: StreamPoint) -> bool {
        match work {
            StreamWork::Launch(launched) => self.launch(launched),
            StreamWork::Copy(copy) => {
                let done = copy.perform(&self.memory.snapshot());
                self.count(|| counts::copied(copy));
                self.judge(done);
            }
            StreamWork::FillPattern(fill) => {
                let done = fill.perform(&self.memory.snapshot());
                self.count(|| counts::filled(fill));
                self.judge(done);
            }
            StreamWork::Job(job, line) => {
                let done = job(&self.memory);
                self.count(|| Value::clone(line));
                self.judge(done);
            }
            StreamWork::Attempt(attempt) => match attempt(&self.memory) {
                Ok(done) => return done,
                Err(reason) => self.judge(Err(reason)),
            },
            StreamWork::Free(address) => {
                if !self.memory.free(*address) {
                    self.judge(Err(format!("{address:#x} was freed before")));
                }
            }
            StreamWork::Call(function, data) => {
                CALLED_BACK.set(true);
                // SAFETY: whoever put it there promises that it may be called with this once all
                // before it is done.
                unsafe { function(*data as *mut c_void) };
                CALLED_BACK.set(false);
            }
            StreamWork::Record(event) => {
                // It may be gone, or recorded anew elsewhere.
                let event = self.events.get_mut(*event).ok();
                if let Some(event) = event.filter(|event| event.mark == Some(mark)) {
                    event.time = Some(Instant::now());
                }
            }
            StreamWork::Allocate | StreamWork::Wait => {}
        }
        true
    }

    fn judge(&mut self, done: Result<(), String>) {
        if let Err(reason) = done {
            say(&reason);
            self.fault = Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
    }

    fn launch(&mut self, launched: &KernelLaunch) {
        let memory = self.memory.snapshot();
        let launch = Launch {
            program: &launched.program,
            grid: launched.grid,
            block: launched.block,
            parameters: &launched.parameters,
            dynamic_shared: launched.dynamic_shared,
            memory: &memory,
            options: self.options.machine,
        };
        // A mistake of the emulator itself must not take the program with it.
        match catch_unwind(AssertUnwindSafe(|| run(&launch))) {
            Ok(Ok(counted)) => self.count(|| counts::launched(launched, &counted)),
            Ok(Err(failure)) => {
                say(&failure.to_string());
                let wrong = if passes(&failure.fault) {
                    &mut self.finding
                } else {
                    &mut self.fault
                };
                *wrong = Some(code(&failure.fault));
            }
            Err(_) => {
                say(&format!("{} made it panic", launched.program.name));
                self.fault = Some(CUresult::CUDA_ERROR_LAUNCH_FAILED);
            }
        }
    }
}

impl DriverGuard {
    /// Does all up to a mark, and waits for what others have to do first.
    pub fn finish(&mut self, mark: StreamPoint) -> Answer {
        while !self.advance(mark) {
            if !self.stir() {
                self.wait();
            }
        }
        self.sound()
    }

    /// Does all there is, and tells what went wrong.
    pub fn finish_all(&mut self) -> Answer {
        let ends = self.streams.ends();
        ends.into_iter().try_for_each(|mark| self.finish(mark))?;
        self.sound()
    }

    /// Does all that is on a stream, and tells what went wrong.
    pub fn finish_stream(&mut self, stream: usize) -> Answer {
        let end = self.streams.end(stream)?;
        self.finish(end)
    }
}
