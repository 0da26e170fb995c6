//! Streams: queues of work, and the dependencies between them.

use std::collections::{BTreeMap, VecDeque};

use cudarc::driver::sys::CUresult;

use super::Answer;

/// The legacy stream. It and the blocking streams wait for each other.
pub(super) const LEGACY: usize = 0;

/// A point in a stream: all work up to this position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamPoint {
    pub stream: usize,
    pub position: u64,
}

/// A path of dependencies to a mark. The last point must be reached first.
#[derive(Debug)]
pub(super) struct DependencyPath(Vec<StreamPoint>);

impl DependencyPath {
    pub fn to(mark: StreamPoint) -> Self {
        Self(vec![mark])
    }
}

/// Queues by the handles of their streams.
pub(super) struct Streams<W> {
    queues: BTreeMap<usize, Queue<W>>,
}

/// A stream.
pub(super) struct Queue<W> {
    pending: VecDeque<Task<W>>,
    /// The number of tasks that were put on the stream, and the number of tasks that are done.
    issued: u64,
    done: u64,
    /// Whether the stream and the legacy stream wait for each other.
    pub blocking: bool,
    /// Whether the handle is still valid.
    open: bool,
    pub priority: i32,
    /// The capture that receives the work of the stream.
    pub capture: Option<usize>,
    /// The number of queries since work was last put on the stream.
    pub asked: u32,
}

struct Task<W> {
    work: W,
    after: Vec<StreamPoint>,
}

impl<W> Default for Streams<W> {
    fn default() -> Self {
        let queues = BTreeMap::from([(LEGACY, Queue::new(true, 0))]);
        Self { queues }
    }
}

impl<W> Queue<W> {
    fn new(blocking: bool, priority: i32) -> Self {
        Self {
            pending: VecDeque::new(),
            issued: 0,
            done: 0,
            blocking,
            open: true,
            priority,
            capture: None,
            asked: 0,
        }
    }
}

impl<W> Streams<W> {
    /// Opens a stream under a new handle.
    pub fn open(&mut self, handle: usize, blocking: bool, priority: i32) {
        self.queues.insert(handle, Queue::new(blocking, priority));
    }

    /// Makes a handle invalid. Work on the stream is still executed.
    pub fn close(&mut self, handle: usize) -> Answer {
        self.get(handle)?.open = false;
        let idle = |queue: &Queue<W>| !queue.open && queue.pending.is_empty();
        self.queues.retain(|_, queue| !idle(queue));
        Ok(())
    }

    /// Returns a stream by its handle.
    pub fn get(&mut self, handle: usize) -> Answer<&mut Queue<W>> {
        let queue = self.queues.get_mut(&handle).filter(|queue| queue.open);
        queue.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// Returns every stream, including closed streams with work left.
    pub fn all(&mut self) -> impl Iterator<Item = &mut Queue<W>> {
        self.queues.values_mut()
    }

    /// Returns the handles of all open streams.
    pub fn handles(&self) -> Vec<usize> {
        let open = self.queues.iter().filter(|(_, queue)| queue.open);
        open.map(|(handle, _)| *handle).collect()
    }

    /// Puts work behind all work of a stream, and behind `after` on other streams.
    pub fn put(
        &mut self,
        stream: usize,
        work: W,
        mut after: Vec<StreamPoint>,
    ) -> Answer<StreamPoint> {
        let blocking = self.get(stream)?.blocking;
        // The legacy stream and the blocking streams are ordered with each other.
        let others = self.queues.iter().filter(|(handle, queue)| match stream {
            LEGACY => **handle != LEGACY && queue.blocking,
            _ => blocking && **handle == LEGACY,
        });
        after.extend(others.map(|(handle, queue)| queue.end(*handle)));
        after.retain(|mark| !self.passed(*mark));
        let queue = self.get(stream)?;
        queue.pending.push_back(Task { work, after });
        queue.issued += 1;
        queue.asked = 0;
        Ok(queue.end(stream))
    }

    /// Returns whether all work up to a mark is done.
    pub fn passed(&self, mark: StreamPoint) -> bool {
        let queue = self.queues.get(&mark.stream);
        queue.is_none_or(|queue| queue.done >= mark.position)
    }

    /// Returns the current end of a stream.
    pub fn end(&mut self, stream: usize) -> Answer<StreamPoint> {
        Ok(self.get(stream)?.end(stream))
    }

    /// Returns the ends of all streams.
    pub fn ends(&self) -> Vec<StreamPoint> {
        let ends = self.queues.iter().map(|(handle, queue)| queue.end(*handle));
        ends.collect()
    }

    /// Returns the stream whose first task is the next step of a path, or `None` at the end of the path.
    pub fn next(&self, way: &mut DependencyPath) -> Option<usize> {
        while let Some(mark) = way.0.last().copied() {
            if self.passed(mark) {
                way.0.pop();
                continue;
            }
            // No task waits for work that is put on a stream later, so this loop ends.
            match self.waits(mark.stream) {
                Some(first) => way.0.push(first),
                None => return Some(mark.stream),
            }
        }
        None
    }

    /// Returns the point that the first task of a stream waits for.
    fn waits(&self, stream: usize) -> Option<StreamPoint> {
        let first = self.queues.get(&stream)?.pending.front()?;
        first.after.iter().copied().find(|mark| !self.passed(*mark))
    }

    /// Returns the first task of a stream, and the mark at its end.
    pub fn first(&self, stream: usize) -> Option<(&W, StreamPoint)> {
        let queue = self.queues.get(&stream)?;
        let position = queue.done + 1;
        let task = queue.pending.front()?;
        Some((&task.work, StreamPoint { stream, position }))
    }

    /// Marks the first task of a stream as done.
    pub fn done(&mut self, stream: usize) {
        let Some(queue) = self.queues.get_mut(&stream) else {
            return;
        };
        if queue.pending.pop_front().is_some() {
            queue.done += 1;
        }
        if !queue.open && queue.pending.is_empty() {
            self.queues.remove(&stream);
        }
    }
}

impl<W> Queue<W> {
    fn end(&self, stream: usize) -> StreamPoint {
        StreamPoint {
            stream,
            position: self.issued,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(streams: &mut Streams<&'static str>, mark: StreamPoint) -> Vec<&'static str> {
        let (mut way, mut order) = (DependencyPath::to(mark), Vec::new());
        while let Some(stream) = streams.next(&mut way) {
            let (work, end) = streams.first(stream).unwrap();
            order.push(*work);
            assert!(!streams.passed(end));
            streams.done(stream);
            assert!(streams.passed(end));
        }
        order
    }

    #[test]
    fn only_what_a_mark_waits_for_is_done() {
        let mut streams = Streams::default();
        streams.open(1, false, 0);
        streams.open(2, false, 0);
        let a = streams.put(1, "a", vec![]).unwrap();
        streams.put(1, "late", vec![]).unwrap();
        streams.put(2, "free", vec![]).unwrap();
        let b = streams.put(2, "b", vec![a]).unwrap();
        streams.put(2, "later", vec![]).unwrap();
        assert_eq!(order(&mut streams, b), ["free", "a", "b"]);
        assert!(streams.passed(b) && streams.passed(a));
        let end = streams.end(1).unwrap();
        assert!(!streams.passed(end));
        assert_eq!(order(&mut streams, end), ["late"]);
    }

    #[test]
    fn the_legacy_stream_and_blocking_ones_wait_for_each_other() {
        let mut streams = Streams::default();
        streams.open(1, true, 0);
        streams.open(2, false, 0);
        streams.put(1, "blocking", vec![]).unwrap();
        streams.put(2, "free", vec![]).unwrap();
        streams.put(LEGACY, "legacy", vec![]).unwrap();
        let end = streams.put(1, "behind", vec![]).unwrap();
        assert_eq!(order(&mut streams, end), ["blocking", "legacy", "behind"]);
    }

    #[test]
    fn a_closed_stream_ends_its_work() {
        let mut streams = Streams::default();
        streams.open(1, false, 0);
        let end = streams.put(1, "a", vec![]).unwrap();
        streams.close(1).unwrap();
        assert!(streams.get(1).is_err());
        assert_eq!(streams.ends().len(), 2);
        assert_eq!(order(&mut streams, end), ["a"]);
        assert_eq!(streams.ends().len(), 1);
        assert!(streams.passed(end));
    }

    #[test]
    fn long_chains_between_streams_need_no_stack() {
        let mut streams = Streams::default();
        streams.open(1, false, 0);
        streams.open(2, false, 0);
        let mut last = streams.put(1, "x", vec![]).unwrap();
        for turn in 0..100_000 {
            last = streams.put(1 + turn % 2, "x", vec![last]).unwrap();
        }
        assert_eq!(order(&mut streams, last).len(), 100_001);
    }
}
