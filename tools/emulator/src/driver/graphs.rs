//! Captures streams into graphs, and launches graphs.
//!
//! A graph stores its work in the order of the capture, and runs in this order. If several streams were captured,
//! this is one of the valid orders.

use std::cell::Cell;
use std::ffi::{c_uint, c_ulonglong};
use std::thread::{self, ThreadId};

use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeType, CUresult, CUstream,
    CUstreamCaptureMode_enum as Mode, CUstreamCaptureStatus_enum as Status,
};

use super::queue::LEGACY;
use super::state::{DriverState, in_context, on_device};
use super::streams::named;
use super::work::StreamWork;
use super::{Answer, OutPointer};

/// A capture in progress.
pub(super) struct Capture {
    nodes: Vec<StreamWork>,
    /// The stream that began the capture. It must also end it.
    origin: usize,
    /// The thread that began the capture, and its mode.
    thread: ThreadId,
    mode: Mode,
    /// Whether all calls so far are allowed in a capture.
    valid: bool,
}

impl Capture {
    /// Returns whether the capture prohibits unsafe calls of this thread. The thread has its own mode.
    fn prohibits_here(&self, thread_mode: Mode) -> bool {
        let is_own = self.thread == thread::current().id();
        match thread_mode {
            Mode::CU_STREAM_CAPTURE_MODE_RELAXED => false,
            _ if self.mode == Mode::CU_STREAM_CAPTURE_MODE_RELAXED => false,
            Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL => is_own,
            Mode::CU_STREAM_CAPTURE_MODE_GLOBAL => {
                is_own || self.mode == Mode::CU_STREAM_CAPTURE_MODE_GLOBAL
            }
        }
    }
}

thread_local! {
    /// Interaction of calls of this thread with captures: see `cuThreadExchangeStreamCaptureMode`.
    static THREAD_MODE: Cell<Mode> = const { Cell::new(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL) };
}

fn mode_of(number: c_uint) -> Answer<Mode> {
    let modes = [
        Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
    ];
    let named = modes.into_iter().find(|mode| *mode as c_uint == number);
    named.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// A captured graph.
pub(super) struct Graph {
    /// The handle and the work of each node.
    nodes: Vec<(usize, StreamWork)>,
}

impl DriverState {
    /// Adds work to the capture of a stream. Returns whether the stream is being captured.
    pub fn captured(&mut self, stream: usize, work: &StreamWork) -> Answer<bool> {
        let Some(capture) = self.streams.get(stream)?.capture else {
            self.not_implicit(stream)?;
            return Ok(false);
        };
        let capture = self.captures.get_mut(capture)?;
        if !capture.valid {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        if work.node().is_some() {
            capture.nodes.push(work.clone());
        }
        Ok(true)
    }

    /// Fails if work on the legacy stream would wait for a blocking stream that is being captured.
    fn not_implicit(&mut self, stream: usize) -> Answer {
        let captured = self.streams.all().filter(|queue| queue.blocking);
        let captured: Vec<_> = captured.filter_map(|queue| queue.capture).collect();
        if stream != LEGACY || captured.is_empty() {
            return Ok(());
        }
        for capture in captured {
            self.captures.get_mut(capture)?.valid = false;
        }
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    }

    /// Fails for a call that a capture cannot contain. Captures that prohibit the call on this thread become invalid.
    pub fn not_captured(&mut self) -> Answer {
        let mut allowed = Ok(());
        for capture in self.captures.values_mut() {
            if capture.prohibits_here(THREAD_MODE.get()) {
                capture.valid = false;
                allowed = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            }
        }
        allowed
    }

    /// Fails for a call that waits for a stream that is being captured.
    pub fn stream_not_captured(&mut self, stream: usize) -> Answer {
        match self.streams.get(stream)?.capture {
            Some(capture) => {
                self.captures.get_mut(capture)?.valid = false;
                Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            }
            None => self.not_implicit(stream),
        }
    }

    /// Adds a stream to a capture, since it waits for an event of the capture.
    pub fn join_capture(&mut self, stream: usize, capture: usize) -> Answer {
        self.captures.get(capture)?;
        let queue = self.streams.get(stream)?;
        match queue.capture {
            Some(other) if other != capture => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE),
            _ => {
                queue.capture = Some(capture);
                Ok(())
            }
        }
    }

    fn begin(&mut self, stream: usize, mode: Mode) -> Answer {
        if stream == LEGACY {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.streams.get(stream)?.capture.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        let capture = self.captures.add(Capture {
            nodes: Vec::new(),
            origin: stream,
            thread: thread::current().id(),
            mode,
            valid: true,
        });
        self.streams.get(stream)?.capture = Some(capture);
        Ok(())
    }

    fn end_capture(&mut self, stream: usize) -> Answer<usize> {
        let handle = self.streams.get(stream)?.capture;
        let handle = handle.ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        if self.captures.get(handle)?.origin != stream {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        let capture = self.captures.remove(handle)?;
        for queue in self.streams.all() {
            queue.capture = queue.capture.filter(|other| *other != handle);
        }
        if !capture.valid {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let mut nodes = Vec::new();
        for work in capture.nodes {
            if let Some(kind) = work.node() {
                nodes.push((self.nodes.add(kind), work));
            }
        }
        Ok(self.graphs.add(Graph { nodes }))
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) -> CUresult {
    in_context(|world| world.begin(named(stream)?, mode_of(mode)?))
}

/// Sets the mode of the calling thread, and returns the previous mode. A thread in relaxed mode may make unsafe calls
/// during any capture. A thread in thread-local mode may make unsafe calls during captures of other threads. Every
/// thread begins in global mode.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> CUresult {
    on_device(0, |_| {
        // SAFETY: guaranteed by the caller.
        let mode = unsafe { mode.as_mut() }.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        *mode = THREAD_MODE.replace(mode_of(*mode)?) as c_uint;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamEndCapture(stream: CUstream, graph: OutPointer<CUgraph>) -> CUresult {
    in_context(|world| {
        let captured = named(stream).and_then(|stream| world.end_capture(stream));
        graph.set(*captured.as_ref().unwrap_or(&0) as CUgraph)?;
        captured.map(drop)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamIsCapturing(stream: CUstream, status: OutPointer<c_uint>) -> CUresult {
    in_context(|world| {
        let capture = world.streams.get(named(stream)?)?.capture;
        let capture = capture
            .map(|capture| world.captures.get(capture))
            .transpose()?;
        status.set(match capture {
            None => Status::CU_STREAM_CAPTURE_STATUS_NONE,
            Some(Capture { valid: true, .. }) => Status::CU_STREAM_CAPTURE_STATUS_ACTIVE,
            Some(_) => Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
        } as c_uint)
    })
}

/// Returns the number of nodes if `nodes` is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetNodes(
    graph: CUgraph,
    nodes: *mut CUgraphNode,
    count: *mut usize,
) -> CUresult {
    in_context(|world| {
        let all = &world.graphs.get(graph as usize)?.nodes;
        // SAFETY: guaranteed by the caller.
        let count = unsafe { count.as_mut() }.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        if nodes.is_null() {
            *count = all.len();
            return Ok(());
        }
        for index in 0..*count {
            let node = all.get(index).map_or(0, |(node, _)| *node);
            // SAFETY: guaranteed by the caller: there is space for this number of nodes.
            unsafe { nodes.add(index).write(node as CUgraphNode) };
        }
        *count = all.len().min(*count);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeGetType(
    node: CUgraphNode,
    kind: OutPointer<CUgraphNodeType>,
) -> CUresult {
    in_context(|world| kind.set(*world.nodes.get(node as usize)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: CUgraph) -> CUresult {
    in_context(|world| {
        let graph = world.graphs.remove(graph as usize)?;
        let mut nodes = graph.nodes.iter();
        nodes.try_for_each(|(node, _)| world.nodes.remove(*node).map(drop))
    })
}

/// Instantiates a graph. Flags are not supported, since the emulator has no graphs that allocate or free.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithFlags(
    executable: OutPointer<CUgraphExec>,
    graph: CUgraph,
    _flags: c_ulonglong,
) -> CUresult {
    in_context(|world| {
        let nodes = &world.graphs.get(graph as usize)?.nodes;
        let work: Vec<_> = nodes.iter().map(|(_, work)| work.clone()).collect();
        let memory = |work: &StreamWork| matches!(work, StreamWork::Allocate | StreamWork::Free(_));
        if work.iter().any(memory) {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        executable.set(world.executables.add(work) as CUgraphExec)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(executable: CUgraphExec) -> CUresult {
    in_context(|world| world.executables.remove(executable as usize).map(drop))
}

/// Does nothing: there is nothing to upload.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphUpload(executable: CUgraphExec, stream: CUstream) -> CUresult {
    in_context(|world| {
        world.streams.get(named(stream)?)?;
        world.executables.get(executable as usize).map(drop)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) -> CUresult {
    in_context(|world| {
        let stream = named(stream)?;
        let work = world.executables.get(executable as usize)?.clone();
        work.into_iter()
            .try_for_each(|work| world.put(stream, work))
    })
}
