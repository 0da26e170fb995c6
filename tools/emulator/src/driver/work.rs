//! Executes the work on a stream.

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

/// A host function.
pub(super) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Work on a stream.
#[derive(Clone)]
pub(super) enum StreamWork {
    Launch(Arc<KernelLaunch>),
    Copy(Copy),
    FillPattern(FillPattern),
    /// A marker for an allocation. The allocation happens at the call.
    Allocate,
    Free(u64),
    Call(HostFunction, usize),
    /// The work of other libraries, and its line in the file of counts.
    Job(Job, Arc<Value>),
    Attempt(Attempt),
    /// Records an event, given by its handle.
    Record(usize),
    /// Waits for the dependencies of the stream.
    Wait,
}

impl StreamWork {
    /// Returns the kind of graph node, or `None` for work that only orders other work.
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
    /// Puts work on a stream, or into the capture of the stream.
    pub fn put(&mut self, stream: usize, work: StreamWork) -> Answer {
        self.put_after(stream, work, Vec::new())
    }

    /// Puts work on a stream like [`put`](Self::put), behind points of other streams too.
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

    /// Executes all work up to a mark that can run now. Returns whether the mark was reached.
    pub fn advance(&mut self, mark: StreamPoint) -> bool {
        let mut way = DependencyPath::to(mark);
        while let Some(stream) = self.streams.next(&mut way) {
            let Some((work, end)) = self.streams.first(stream) else {
                return false;
            };
            let work = work.clone();
            // Work behind a fault never runs.
            if self.fault.is_none() && !self.perform(&work, end) {
                return false;
            }
            self.streams.done(stream);
            self.performed += 1;
        }
        true
    }

    /// Executes all work that can run now, on every stream. Returns whether any work was executed.
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

    /// Fails if a kernel has caused a fault.
    pub fn sound(&mut self) -> Answer {
        let wrong = self.fault.or(self.finding.take());
        wrong.map_or(Ok(()), Err)
    }

    /// Executes one task. Returns `false` if the task cannot run yet.
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
                // SAFETY: the caller guarantees that the function may be called with this argument after all earlier
                // work is done.
                unsafe { function(*data as *mut c_void) };
                CALLED_BACK.set(false);
            }
            StreamWork::Record(event) => {
                // The event may have been destroyed, or recorded again elsewhere.
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
        // A panic of the emulator must not end the program.
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
    /// Executes all work up to a mark. Waits for the work of other threads first if necessary.
    pub fn finish(&mut self, mark: StreamPoint) -> Answer {
        while !self.advance(mark) {
            if !self.stir() {
                self.wait();
            }
        }
        self.sound()
    }

    /// Executes all work. Fails if a kernel causes a fault.
    pub fn finish_all(&mut self) -> Answer {
        let ends = self.streams.ends();
        ends.into_iter().try_for_each(|mark| self.finish(mark))?;
        self.sound()
    }

    /// Executes all work on a stream. Fails if a kernel causes a fault.
    pub fn finish_stream(&mut self, stream: usize) -> Answer {
        let end = self.streams.end(stream)?;
        self.finish(end)
    }
}
